// The only file that knows nanobind: it checks shapes and dtypes, releases the GIL and calls plain C++.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "bounds.h"
#include "checks.h"
#include "gather.h"
#include "packing.h"
#include "permute.h"
#include "search.h"
#include "stream.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T>
using Vector = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void check_aligned(const void* data, size_t bytes) {
    if (reinterpret_cast<uintptr_t>(data) % bytes != 0)
        throw std::invalid_argument("an array does not lie at a multiple of its element's size: pass a copy");
}

template <class T>
std::span<T> span(const Vector<T>& array) {
    check_aligned(array.data(), sizeof(T));
    return {array.data(), array.shape(0)};
}

template <class Packer>
void def_packer(nb::module_& module, const char* name, Packer packer) {
    module.def(
        name,
        [packer](Vector<const int32_t> lengths, int32_t capacity, int64_t max_sequences, uint64_t seed,
                 Vector<int64_t> offsets, Vector<int32_t> indices) {
            nb::gil_scoped_release release;
            multipack::check_packing(span(lengths), capacity, max_sequences, span(offsets), span(indices));
            return packer(span(lengths), capacity, max_sequences, seed, span(offsets), span(indices));
        },
        "lengths"_a.noconvert(), "capacity"_a, "max_sequences"_a, "seed"_a, "offsets"_a.noconvert(),
        "indices"_a.noconvert());
}

template <class Function>
void def_counts(nb::module_& module, const char* name, Function function) {
    module.def(
        name,
        [function](Vector<const int64_t> counts, int32_t capacity, int64_t max_sequences) {
            nb::gil_scoped_release release;
            multipack::check_counts(span(counts), capacity, max_sequences);
            return function(span(counts), capacity, max_sequences);
        },
        "counts"_a.noconvert(), "capacity"_a, "max_sequences"_a);
}

void def_stream_pool(nb::module_& module) {
    using multipack::StreamPool;
    nb::class_<StreamPool::State>(module, "StreamPoolState")
        .def(nb::init<std::vector<int64_t>, std::vector<int64_t>, std::vector<int32_t>, int64_t, int64_t,
                      uint64_t>(),
             "ids"_a, "arrivals"_a, "lengths"_a, "next_arrival"_a, "search_budget"_a, "random"_a)
        .def_ro("ids", &StreamPool::State::ids)
        .def_ro("arrivals", &StreamPool::State::arrivals)
        .def_ro("lengths", &StreamPool::State::lengths)
        .def_ro("next_arrival", &StreamPool::State::next_arrival)
        .def_ro("search_budget", &StreamPool::State::search_budget)
        .def_ro("random", &StreamPool::State::random);
    nb::class_<StreamPool>(module, "StreamPool")
        .def(
            "__init__",
            [](StreamPool* self, int32_t capacity, int32_t pool_size, int64_t max_sequences, uint64_t seed) {
                multipack::check_pool(capacity, pool_size, max_sequences);
                new (self) StreamPool(capacity, pool_size, max_sequences, seed);
            },
            "capacity"_a, "pool_size"_a, "max_sequences"_a, "seed"_a)
        .def("__len__", &StreamPool::size)
        .def_prop_ro("full", &StreamPool::full)
        .def(
            "push",
            [](StreamPool& pool, int64_t id, int32_t length) {
                if (length < 1 || length > pool.capacity())
                    throw std::invalid_argument("length outside 1..capacity");
                if (pool.full()) throw std::invalid_argument("the pool is full");
                pool.push(id, {&length, 1});
            },
            "id"_a, "length"_a)
        .def(
            "fill",
            [](StreamPool& pool, bool longest_first) {
                if (pool.size() == 0) throw std::invalid_argument("the pool is empty");
                const auto lead = longest_first ? StreamPool::Lead::kLongest : StreamPool::Lead::kOldest;
                const std::span<const int64_t> ids = pool.fill(lead).ids;
                return std::vector<int64_t>(ids.begin(), ids.end());
            },
            "longest_first"_a)
        .def("state", &StreamPool::state)
        .def(
            "restore",
            [](StreamPool& pool, const StreamPool::State& state) {
                multipack::check_state(pool, state);
                pool.restore(state);
            },
            "state"_a);
}

void def_packing(nb::module_& module) {
    using namespace multipack;
    def_packer(module, "next_fit",
               [](auto lengths, auto capacity, auto limit, auto, auto offsets, auto indices) {
                   return next_fit(lengths, capacity, limit, offsets, indices);
               });
    def_packer(module, "best_fit_decreasing", best_fit_decreasing);
    def_packer(module, "stream",
               [](auto lengths, auto capacity, auto limit, auto seed, auto offsets, auto indices) {
                   const int64_t tokens = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
                   const int32_t pool_size =
                       stream_pool_size(static_cast<int64_t>(lengths.size()), tokens, capacity);
                   return stream(lengths, capacity, limit, seed, pool_size, 0.0, offsets, indices);
               });
    def_packer(module, "pack_auto", pack_auto);
    def_packer(module, "pack_fewest", pack_fewest);
    def_counts(module, "best_fit_decreasing_bins", best_fit_decreasing_bins);
    def_counts(module, "lower_bound", lower_bound);
    module.attr("MAX_CAPACITY") = kMaxCapacity;
    module.def(
        "shuffle_bins",
        [](uint64_t seed, Vector<int64_t> offsets, Vector<int32_t> indices) {
            nb::gil_scoped_release release;
            check_bins(span(offsets), static_cast<int64_t>(indices.shape(0)));
            shuffle_bins(0, static_cast<int64_t>(offsets.shape(0)) - 1, seed, span(offsets), span(indices));
        },
        "seed"_a, "offsets"_a.noconvert(), "indices"_a.noconvert());
    module.def(
        "permuted_rows",
        [](int64_t num_rows, int64_t block, uint64_t seed, int64_t start, Vector<int64_t> rows) {
            nb::gil_scoped_release release;
            check_window(num_rows, block, start, static_cast<int64_t>(rows.shape(0)));
            permuted_rows(num_rows, block, seed, start, span(rows));
        },
        "num_rows"_a, "block"_a, "seed"_a, "start"_a, "rows"_a.noconvert());
}

/// Where the rows of a token file lie. Keeps the arrays alive.
struct PyFileIndex {
    multipack::FileIndex index;
    Vector<const uint8_t> begins, lengths;
    std::optional<Vector<const uint8_t>> groups;

    int64_t num_rows() const {
        if (!groups) return index.num_sequences;
        return std::max<int64_t>(static_cast<int64_t>(groups->shape(0) / sizeof(int64_t)) - 1, 0);
    }
};

PyFileIndex make_file_index(Vector<const uint8_t> begins, Vector<const uint8_t> lengths,
                            std::optional<Vector<const uint8_t>> groups, int64_t element_bytes) {
    const size_t num_sequences = begins.shape(0) / sizeof(int64_t);
    if (lengths.shape(0) / sizeof(int32_t) != num_sequences || element_bytes < 1)
        throw std::invalid_argument("an index needs one int64 begin and one int32 length a sequence");
    const auto bytes = [](const auto& array) { return reinterpret_cast<const std::byte*>(array.data()); };
    return {{bytes(begins), bytes(lengths), static_cast<int64_t>(num_sequences),
             groups ? bytes(*groups) : nullptr, element_bytes},
            begins,
            lengths,
            groups};
}

/// Raw Arrow buffers, or parts of mapped files, with some rows of a column. Keeps the arrays alive.
struct PyChunk {
    multipack::Chunk chunk;
    std::optional<Vector<const uint8_t>> offsets;
    std::optional<Vector<const uint8_t>> values;
    std::shared_ptr<const PyFileIndex> index;
};

PyChunk make_chunk(int64_t num_rows, std::optional<Vector<const uint8_t>> offsets,
                   std::optional<Vector<const uint8_t>> values, int64_t first_value, int64_t num_values,
                   std::shared_ptr<const PyFileIndex> index) {
    const auto bytes = [](const auto& array) {
        return array ? reinterpret_cast<const std::byte*>(array->data()) : nullptr;
    };
    multipack::Chunk chunk{num_rows, bytes(offsets), bytes(values), first_value, num_values};
    if (index) chunk.index = index->index;
    return {chunk, offsets, values, std::move(index)};
}

struct PyColumn {
    std::vector<PyChunk> chunks;
    multipack::Column column;
};

/// A column reads raw memory, so the buffers must hold what the chunk says, whatever Python checked before.
void check_chunk(const PyChunk& chunk, multipack::Element element, int offset_bytes, int64_t row_length) {
    const auto& [num_rows, offsets, values, first_value, num_values, index] = chunk.chunk;
    if (num_rows < 0 || first_value < 0 || num_values < 0)
        throw std::invalid_argument("a chunk has a negative size or position");
    if (index) {
        if (num_rows > chunk.index->num_rows())
            throw std::invalid_argument("a chunk of " + std::to_string(num_rows) + " rows has an index of " +
                                        std::to_string(chunk.index->num_rows()));
    } else if (offset_bytes != 0) {
        const size_t size = chunk.offsets ? chunk.offsets->shape(0) : 0;
        if (size / offset_bytes < static_cast<uint64_t>(num_rows) + (num_rows > 0))
            throw std::invalid_argument("a chunk of " + std::to_string(num_rows) + " rows has only " +
                                        std::to_string(size) + " bytes of offsets");
    }
    if (!index && offset_bytes == 0 && row_length > 0 && num_rows > num_values / row_length)
        throw std::invalid_argument("a chunk of " + std::to_string(num_rows) + " rows of " +
                                    std::to_string(row_length) + " has only " + std::to_string(num_values) +
                                    " values");
    const uint64_t bits = 8 * (chunk.values ? chunk.values->shape(0) : 0);
    const uint64_t wanted = static_cast<uint64_t>(first_value) + static_cast<uint64_t>(num_values);
    if (bits / multipack::element_bits(element) < wanted)
        throw std::invalid_argument("a chunk of " + std::to_string(wanted) + " values has only " +
                                    std::to_string(bits / 8) + " bytes of them");
}

PyColumn make_column(const std::string& element_name, int offset_bytes, int64_t row_length,
                     std::vector<PyChunk> chunks) {
    const multipack::Element element = multipack::element_named(element_name);
    if ((offset_bytes != 0 && offset_bytes != 4 && offset_bytes != 8) || row_length < 0)
        throw std::invalid_argument("offset_bytes must be 0, 4 or 8 and row_length not negative");
    std::vector<multipack::Chunk> raw;
    for (const PyChunk& chunk : chunks) {
        check_chunk(chunk, element, offset_bytes, row_length);
        raw.push_back(chunk.chunk);
    }
    return {std::move(chunks), multipack::Column(element, offset_bytes, row_length, std::move(raw))};
}

using Out = nb::ndarray<nb::c_contig, nb::device::cpu>;

/// Collects the outputs of one batch and keeps their arrays alive until run() has written them. Numbers that
/// say where to write are copies, so that they stay as they were checked while other threads and outputs
/// write.
struct PyGather {
    multipack::Batch batch;
    std::vector<int64_t> rows, starts, lengths, places;
    std::vector<Out> outputs;
    std::vector<std::shared_ptr<const PyColumn>> columns;

    const multipack::Column* hold(std::shared_ptr<const PyColumn> column) {
        columns.push_back(std::move(column));
        return &columns.back()->column;
    }

    void* hold(const Out& out, multipack::Output& output) {
        if (out.dtype() == nb::dtype<int64_t>())
            output = multipack::Output::int64;
        else if (out.dtype() == nb::dtype<float>())
            output = multipack::Output::float32;
        else if (out.dtype() == nb::dtype<bool>())
            output = multipack::Output::boolean;
        else
            throw nb::type_error("an output must be int64, float32 or bool");
        hold(out);
        return out.data();
    }

    void hold(const Out& out) {
        if (out.size() != static_cast<size_t>(batch.num_slots))
            throw std::invalid_argument("an output has " + std::to_string(out.size()) + " slots, the batch " +
                                        std::to_string(batch.num_slots));
        check_aligned(out.data(), out.itemsize());
        outputs.push_back(out);
    }
};

void init_gather(PyGather* self, Vector<const int64_t> rows, std::optional<Vector<const int64_t>> starts,
                 Vector<const int64_t> lengths, Vector<const int64_t> places, int64_t num_slots) {
    const size_t size = rows.shape(0);
    if (lengths.shape(0) != size || places.shape(0) != size || (starts && starts->shape(0) != size) ||
        num_slots < 0)
        throw std::invalid_argument("rows, starts, lengths and places must have equal lengths");
    const auto copy = [](const Vector<const int64_t>& array) {
        const std::span<const int64_t> values = span(array);
        return std::vector<int64_t>(values.begin(), values.end());
    };
    PyGather gather;
    gather.rows = copy(rows);
    if (starts) gather.starts = copy(*starts);
    gather.lengths = copy(lengths);
    gather.places = copy(places);
    gather.batch.sequences = {gather.rows, gather.starts, gather.lengths, gather.places};
    gather.batch.num_slots = num_slots;
    new (self) PyGather(std::move(gather));
}

void gather_tokens(PyGather& self, std::shared_ptr<const PyColumn> column, const Out& out, double fill) {
    multipack::TokenTask task{self.hold(std::move(column)), {}, nullptr, fill};
    task.out = self.hold(out, task.output);
    self.batch.tokens.push_back(task);
}

void gather_labels(PyGather& self, std::shared_ptr<const PyColumn> column,
                   std::vector<std::shared_ptr<const PyColumn>> masks, const Out& out, int64_t ignore_index,
                   bool mask_first) {
    multipack::LabelTask task{self.hold(std::move(column)), {}, {}, nullptr, ignore_index, mask_first};
    for (auto& mask : masks) task.masks.push_back(self.hold(std::move(mask)));
    task.out = self.hold(out, task.output);
    if (task.output == multipack::Output::boolean) throw nb::type_error("labels must be int64 or float32");
    self.batch.labels = std::move(task);
}

void gather_segments(PyGather& self, Vector<const int32_t> boundaries, const Out& positions,
                     const Out& segment_ids, int64_t first_position, int64_t slots_per_row) {
    if (positions.dtype() != nb::dtype<int64_t>() || segment_ids.dtype() != nb::dtype<int32_t>())
        throw nb::type_error("positions must be int64 and segment_ids int32");
    self.hold(positions);
    self.hold(segment_ids);
    const std::span<const int32_t> ends = span(boundaries);
    self.batch.segments = {{ends.begin(), ends.end()},
                           {static_cast<int64_t*>(positions.data()), positions.size()},
                           {static_cast<int32_t*>(segment_ids.data()), segment_ids.size()},
                           first_position,
                           slots_per_row};
}

int64_t run_gather(const PyGather& self) {
    const multipack::Batch batch = self.batch;  // other threads may add outputs meanwhile
    nb::gil_scoped_release release;
    return multipack::gather(batch);
}

void column_lengths(const PyColumn& self, Vector<const int64_t> rows, Vector<int64_t> lengths) {
    if (rows.shape(0) != lengths.shape(0))
        throw std::invalid_argument("rows and lengths must have equal lengths");
    nb::gil_scoped_release release;
    multipack::row_lengths(self.column, span(rows), span(lengths));
}

void def_gather(nb::module_& module) {
    nb::class_<PyFileIndex>(module, "FileIndex")
        .def(nb::new_(&make_file_index), "begins"_a.noconvert(), "lengths"_a.noconvert(),
             "groups"_a.noconvert().none(), "element_bytes"_a)
        .def_prop_ro("num_rows", &PyFileIndex::num_rows);
    nb::class_<PyChunk>(module, "Chunk")
        .def(nb::new_(&make_chunk), "num_rows"_a, "offsets"_a.noconvert().none(),
             "values"_a.noconvert().none(), "first_value"_a, "num_values"_a, "index"_a.none() = nb::none());
    nb::class_<PyColumn>(module, "Column")
        .def(nb::new_(&make_column), "element"_a, "offset_bytes"_a, "row_length"_a, "chunks"_a)
        .def_prop_ro("num_rows", [](const PyColumn& self) { return self.column.num_rows(); })
        .def("lengths", &column_lengths, "rows"_a.noconvert(), "lengths"_a.noconvert());
    nb::class_<PyGather>(module, "Gather")
        .def("__init__", &init_gather, "rows"_a.noconvert(), "starts"_a.noconvert().none(),
             "lengths"_a.noconvert(), "places"_a.noconvert(), "num_slots"_a)
        .def("tokens", &gather_tokens, "column"_a, "out"_a.noconvert(), "fill"_a)
        .def("labels", &gather_labels, "column"_a, "masks"_a, "out"_a.noconvert(), "ignore_index"_a,
             "mask_first"_a)
        .def("segments", &gather_segments, "boundaries"_a.noconvert(), "positions"_a.noconvert(),
             "segment_ids"_a.noconvert(), "first_position"_a, "slots_per_row"_a)
        .def("run", &run_gather);
    module.def("instruction_sets", [] {
        nb::list names;
        for (std::string_view name : multipack::instruction_sets())
            names.append(nb::str(name.data(), name.size()));
        return names;
    });
    module.def(
        "use_instruction_set", [](const std::string& name) { multipack::use_instruction_set(name); },
        "name"_a);
}

}  // namespace

NB_MODULE(_core, module) {
    module.doc() = "Compiled kernels of multipack.";
    def_packing(module);
    def_stream_pool(module);
    def_gather(module);
}
