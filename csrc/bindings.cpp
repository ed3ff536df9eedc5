// The only file that knows nanobind: it checks shapes and dtypes, releases the GIL and calls plain C++.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "gather.h"
#include "packing.h"
#include "permute.h"
#include "stream.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

template <class T>
std::span<T> span(const Vector<T>& array) {
    return {array.data(), array.shape(0)};
}

/// A packer writes without bounds checks, so its input is checked here, whatever Python checked before.
void check_packing(std::span<const int32_t> lengths, int32_t capacity, int64_t max_sequences, size_t num_offsets,
                   size_t num_indices) {
    if (capacity < 1 || max_sequences < 1) throw std::invalid_argument("capacity and max_sequences must be at least 1");
    if (lengths.size() > INT32_MAX) throw std::invalid_argument("at most 2^31 - 1 sequences can be packed at once");
    if (num_offsets < lengths.size() + 1 || num_indices < lengths.size())
        throw std::invalid_argument("offsets or indices are too short for the lengths");
    // One pass without branches; the row is sought only when there is one.
    uint32_t worst = 0;
    for (int32_t length : lengths) worst = std::max(worst, static_cast<uint32_t>(length) - 1u);
    if (worst < static_cast<uint32_t>(capacity)) return;
    for (size_t row = 0; row < lengths.size(); ++row) {
        if (lengths[row] < 1 || lengths[row] > capacity)
            throw std::invalid_argument("row " + std::to_string(row) + " has length " + std::to_string(lengths[row]) +
                                        ", outside 1.." + std::to_string(capacity));
    }
}

template <class Packer>
void def_packer(nb::module_& module, const char* name, Packer packer) {
    module.def(
        name,
        [packer](Vector<const int32_t> lengths, int32_t capacity, int64_t max_sequences, uint64_t seed,
                 Vector<int64_t> offsets, Vector<int32_t> indices) {
            nb::gil_scoped_release release;
            check_packing(span(lengths), capacity, max_sequences, offsets.shape(0), indices.shape(0));
            return packer(span(lengths), capacity, max_sequences, seed, span(offsets), span(indices));
        },
        "lengths"_a.noconvert(), "capacity"_a, "max_sequences"_a, "seed"_a, "offsets"_a.noconvert(),
        "indices"_a.noconvert());
}

void check_counts(std::span<const int64_t> counts, int32_t capacity, int64_t max_sequences) {
    if (capacity < 1 || max_sequences < 1) throw std::invalid_argument("capacity and max_sequences must be at least 1");
    if (counts.size() != static_cast<size_t>(capacity) + 1)
        throw std::invalid_argument("counts must hold capacity + 1 numbers");
    for (int64_t count : counts)
        if (count < 0) throw std::invalid_argument("counts must not be negative");
}

template <class Function>
void def_counts(nb::module_& module, const char* name, Function function) {
    module.def(
        name,
        [function](Vector<const int64_t> counts, int32_t capacity, int64_t max_sequences) {
            nb::gil_scoped_release release;
            check_counts(span(counts), capacity, max_sequences);
            return function(span(counts), capacity, max_sequences);
        },
        "counts"_a.noconvert(), "capacity"_a, "max_sequences"_a);
}

void def_packing(nb::module_& module) {
    using namespace multipack;
    def_packer(module, "next_fit", [](auto lengths, auto capacity, auto limit, auto, auto offsets, auto indices) {
        return next_fit(lengths, capacity, limit, offsets, indices);
    });
    def_packer(module, "best_fit_decreasing", best_fit_decreasing);
    def_packer(module, "stream", [](auto lengths, auto capacity, auto limit, auto seed, auto offsets, auto indices) {
        return stream(lengths, capacity, limit, seed, 0.0, offsets, indices);
    });
    def_packer(module, "pack_auto", pack_auto);
    def_counts(module, "best_fit_decreasing_bins", best_fit_decreasing_bins);
    def_counts(module, "lower_bound", lower_bound);
    module.def(
        "permuted_rows",
        [](int64_t num_rows, int64_t block, uint64_t seed, int64_t start, Vector<int64_t> rows) {
            nb::gil_scoped_release release;
            const int64_t count = static_cast<int64_t>(rows.shape(0));
            if (block < 1 || start < 0 || start % block != 0 || count > num_rows - start || count > UINT32_MAX)
                throw std::invalid_argument("window outside the rows, or not at a multiple of the block");
            permuted_rows(num_rows, block, seed, start, span(rows));
        },
        "num_rows"_a, "block"_a, "seed"_a, "start"_a, "rows"_a.noconvert());
}

}  // namespace

NB_MODULE(_core, module) {
    module.doc() = "Compiled kernels of multipack.";
    def_packing(module);
}
