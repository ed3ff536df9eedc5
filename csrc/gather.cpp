#include "gather.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>

namespace multipack {
namespace {

#if defined(__GNUC__) && defined(__x86_64__)
#define MULTIPACK_X86 1
#endif
#if defined(__GNUC__)
#define MULTIPACK_INLINE [[gnu::always_inline]] inline
#else
#define MULTIPACK_INLINE inline
#endif

// ---------------------------------------------------------------------------------------------------------------
// Loops over one row. They are inlined into a function per instruction set below, which the compiler vectorises.

struct float16 {
    uint16_t bits;
};

/// Arrow buffers may lie at any address, so every element is loaded as bytes; compilers turn this into plain loads.
template <class T>
MULTIPACK_INLINE T load(const std::byte* values, int64_t index) {
    T value;
    std::memcpy(&value, values + index * static_cast<int64_t>(sizeof(T)), sizeof(T));
    return value;
}

/// Half to single precision without branches, so that it vectorises; exact, subnormals, infinities and NaN included.
MULTIPACK_INLINE float widen(float16 half) {
    const uint32_t sign = static_cast<uint32_t>(half.bits & 0x8000u) << 16;
    const uint32_t rest = half.bits & 0x7fffu;
    const uint32_t exponent_shift = rest >= 0x7c00u ? (255u - 31u) << 23 : (127u - 15u) << 23;
    const float normal = std::bit_cast<float>((rest << 13) + exponent_shift);
    // A subnormal is rest * 2^-24: put it into the low bits of 0.5 and take 0.5 away again.
    const float subnormal = std::bit_cast<float>(rest | (126u << 23)) - 0.5f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(rest < 0x0400u ? subnormal : normal));
}

template <class Out, class In>
MULTIPACK_INLINE Out to(In value) {
    if constexpr (std::is_same_v<In, float16>) {
        return to<Out>(widen(value));
    } else if constexpr (std::is_same_v<Out, bool>) {
        return value != In{0};
    } else {
        return static_cast<Out>(value);
    }
}

/// False when an unsigned value does not fit int64.
template <class In, class Out>
MULTIPACK_INLINE bool convert_loop(const std::byte* in, int64_t count, Out* out) {
    if constexpr (std::is_same_v<In, uint64_t> && std::is_same_v<Out, int64_t>) {
        uint64_t any = 0;
        for (int64_t i = 0; i < count; ++i) {
            const uint64_t value = load<uint64_t>(in, i);
            any |= value;
            out[i] = static_cast<int64_t>(value);
        }
        return any >> 63 == 0;
    } else {
        for (int64_t i = 0; i < count; ++i) out[i] = to<Out>(load<In>(in, i));
        return true;
    }
}

template <class In, class Label>
MULTIPACK_INLINE void mask_loop(const std::byte* mask, int64_t count, Label ignore, Label* labels) {
    for (int64_t i = 0; i < count; ++i) labels[i] = to<bool>(load<In>(mask, i)) ? labels[i] : ignore;
}

template <class Label>
MULTIPACK_INLINE int64_t count_loop(const Label* labels, int64_t count, Label ignore) {
    int64_t others = 0;
    for (int64_t i = 0; i < count; ++i) others += labels[i] != ignore;
    return others;
}

MULTIPACK_INLINE void positions_loop(int64_t first, int64_t count, int64_t* out) {
    for (int64_t i = 0; i < count; ++i) out[i] = first + i;
}

// ---------------------------------------------------------------------------------------------------------------
// One function per instruction set around each loop.

#define MULTIPACK_KERNELS(SET, ATTRIBUTE)                                                                 \
    struct SET {                                                                                          \
        template <class In, class Out>                                                                    \
        ATTRIBUTE static bool convert(const std::byte* in, int64_t count, void* out) {                    \
            return convert_loop<In, Out>(in, count, static_cast<Out*>(out));                              \
        }                                                                                                 \
        template <class In, class Label>                                                                  \
        ATTRIBUTE static void mask(const std::byte* in, int64_t count, int64_t ignore, void* labels) {    \
            mask_loop<In, Label>(in, count, static_cast<Label>(ignore), static_cast<Label*>(labels));     \
        }                                                                                                 \
        template <class Label>                                                                            \
        ATTRIBUTE static int64_t count(const void* labels, int64_t count, int64_t ignore) {               \
            return count_loop<Label>(static_cast<const Label*>(labels), count, static_cast<Label>(ignore)); \
        }                                                                                                 \
        ATTRIBUTE static void positions(int64_t first, int64_t count, int64_t* out) {                     \
            positions_loop(first, count, out);                                                            \
        }                                                                                                 \
    };

MULTIPACK_KERNELS(Baseline, )
#ifdef MULTIPACK_X86
MULTIPACK_KERNELS(Avx2, __attribute__((target("avx2"))))
MULTIPACK_KERNELS(Avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512"))))
#endif

using Convert = bool (*)(const std::byte* in, int64_t count, void* out);
using Mask = void (*)(const std::byte* in, int64_t count, int64_t ignore, void* labels);
using Count = int64_t (*)(const void* labels, int64_t count, int64_t ignore);

constexpr int num_elements = 12;
constexpr int num_outputs = 3;

struct Kernels {
    std::string_view name;
    std::array<std::array<Convert, num_outputs>, num_elements> convert;
    std::array<std::array<Mask, num_outputs>, num_elements> mask;  // no boolean labels
    std::array<Count, num_outputs> count;
    void (*positions)(int64_t first, int64_t count, int64_t* out);
};

/// Kernels in the order of Element and Output. Bits are unpacked to bytes first, so they share the row of uint8.
template <class Set>
constexpr Kernels kernels_of(std::string_view name) {
    Kernels kernels{name, {}, {}, {}, &Set::positions};
    const auto add = [&kernels]<class In>(Element element, std::type_identity<In>) {
        kernels.convert[static_cast<int>(element)] = {&Set::template convert<In, bool>,
                                                      &Set::template convert<In, int64_t>,
                                                      &Set::template convert<In, float>};
        kernels.mask[static_cast<int>(element)] = {nullptr, &Set::template mask<In, int64_t>,
                                                   &Set::template mask<In, float>};
    };
    add(Element::bit, std::type_identity<uint8_t>{});
    add(Element::int8, std::type_identity<int8_t>{});
    add(Element::int16, std::type_identity<int16_t>{});
    add(Element::int32, std::type_identity<int32_t>{});
    add(Element::int64, std::type_identity<int64_t>{});
    add(Element::uint8, std::type_identity<uint8_t>{});
    add(Element::uint16, std::type_identity<uint16_t>{});
    add(Element::uint32, std::type_identity<uint32_t>{});
    add(Element::uint64, std::type_identity<uint64_t>{});
    add(Element::float16, std::type_identity<float16>{});
    add(Element::float32, std::type_identity<float>{});
    add(Element::float64, std::type_identity<double>{});
    kernels.count = {nullptr, &Set::template count<int64_t>, &Set::template count<float>};
    return kernels;
}

const Kernels baseline = kernels_of<Baseline>("baseline");
#ifdef MULTIPACK_X86
const Kernels avx2 = kernels_of<Avx2>("avx2");
const Kernels avx512 = kernels_of<Avx512>("avx512");
#endif

std::vector<const Kernels*> available_kernels() {
    std::vector<const Kernels*> available{&baseline};
#ifdef MULTIPACK_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) available.push_back(&avx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl"))
        available.push_back(&avx512);
#endif
    return available;
}

std::atomic<const Kernels*> kernels_in_use{available_kernels().back()};

// ---------------------------------------------------------------------------------------------------------------
// Columns.

constexpr std::array<std::string_view, num_elements> element_names{
    "bit",   "int8",   "int16",  "int32",   "int64",   "uint8",
    "uint16", "uint32", "uint64", "float16", "float32", "float64"};

constexpr std::array<int, num_elements> element_bytes{0, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8};
constexpr std::array<int, num_outputs> output_bytes{1, 8, 4};

int64_t load_offset(const Chunk& chunk, int offset_bytes, int64_t index) {
    return offset_bytes == 4 ? load<int32_t>(chunk.offsets, index) : load<int64_t>(chunk.offsets, index);
}

[[noreturn]] void throw_corrupt(int64_t row, int64_t begin, int64_t end, int64_t num_values) {
    throw std::invalid_argument("row " + std::to_string(row) + " has offsets " + std::to_string(begin) + ".." +
                                std::to_string(end) + " into " + std::to_string(num_values) +
                                " values: the column is corrupt; write the data set again");
}

}  // namespace

Element element_named(std::string_view name) {
    const auto found = std::find(element_names.begin(), element_names.end(), name);
    if (found == element_names.end()) throw std::invalid_argument("unknown element type " + std::string(name));
    return static_cast<Element>(found - element_names.begin());
}

int element_bits(Element element) { return std::max(1, 8 * element_bytes[static_cast<int>(element)]); }

Column::Column(Element element, int offset_bytes, int64_t row_length, std::vector<Chunk> chunks)
    : element_(element), offset_bytes_(offset_bytes), row_length_(row_length) {
    int64_t num_rows = 0;
    for (const Chunk& chunk : chunks) {
        if (chunk.num_rows == 0) continue;
        chunks_.push_back(chunk);
        first_rows_.push_back(num_rows);
        num_rows += chunk.num_rows;
    }
    first_rows_.push_back(num_rows);
    const int64_t num_chunks = static_cast<int64_t>(chunks_.size());
    while (num_rows >> shift_ > 4 * num_chunks) ++shift_;
    for (int64_t bucket = 0, chunk = 0; bucket <= (num_rows >> shift_) + 1; ++bucket) {
        while (chunk + 1 < num_chunks && first_rows_[chunk + 1] <= bucket << shift_) ++chunk;
        bucket_.push_back(static_cast<int32_t>(chunk));
    }
}

Slice Column::row(int64_t row) const {
    if (row < 0 || row >= num_rows())
        throw std::out_of_range("row " + std::to_string(row) + " is outside 0.." + std::to_string(num_rows() - 1));
    const int64_t bucket = row >> shift_;
    const auto first = first_rows_.begin() + bucket_[bucket] + 1;
    const auto last = first_rows_.begin() + bucket_[bucket + 1] + 1;
    const int64_t index = std::upper_bound(first, last, row) - first_rows_.begin() - 1;
    const Chunk& chunk = chunks_[index];
    const int64_t local = row - first_rows_[index];
    int64_t begin = local * row_length_;
    int64_t end = begin + row_length_;
    if (offset_bytes_ != 0) {
        begin = load_offset(chunk, offset_bytes_, local);
        end = load_offset(chunk, offset_bytes_, local + 1);
    }
    if (begin < 0 || end < begin || end > chunk.num_values) throw_corrupt(row, begin, end, chunk.num_values);
    return {chunk.values, chunk.first_value + begin, end - begin};
}

void row_lengths(const Column& column, std::span<const int64_t> rows, std::span<int64_t> lengths) {
    for (size_t k = 0; k < rows.size(); ++k) lengths[k] = column.row(rows[k]).length;
}

// ---------------------------------------------------------------------------------------------------------------
// Batches.

namespace {

/// The elements of one column that the sequences of a batch need, found before any is copied: the cache misses on the
/// offsets overlap, and the values of the next sequences can be fetched while one is copied.
class Source {
  public:
    Source(const Column& column, const Sequences& sequences) : column_(column), slices_(sequences.rows.size()) {
        for (size_t k = 0; k < slices_.size(); ++k) {
            Slice slice = column.row(sequences.rows[k]);
            const int64_t start = sequences.starts.empty() ? 0 : sequences.starts[k];
            const int64_t length = sequences.lengths[k];
            if (start < 0 || length < 0 || start > slice.length || length > slice.length - start)
                throw std::invalid_argument("row " + std::to_string(sequences.rows[k]) + " has " +
                                            std::to_string(slice.length) + " elements, but " + std::to_string(length) +
                                            " from " + std::to_string(start) + " on were asked for");
            slices_[k] = {slice.values, slice.begin + start, length};
        }
    }

    Element element() const { return column_.element(); }
    int64_t length(size_t k) const { return slices_[k].length; }
    const std::byte* data(size_t k) const { return at(k, slices_[k].begin); }

    /// Ask for the beginning of sequence k; the processor streams on by itself.
    void prefetch(size_t k) const {
#if defined(__GNUC__)
        if (k >= slices_.size()) return;
        constexpr int64_t line = 64, most = 32 * line;
        const std::byte* begin = data(k);
        const int64_t bytes = std::min(most, at(k, slices_[k].begin + slices_[k].length) - begin);
        for (int64_t i = 0; i < bytes; i += line) __builtin_prefetch(begin + i);
#endif
    }

    /// Calls `use(bytes, first, count)` on the elements of sequence k, bits unpacked to bytes block by block.
    template <class Use>
    void for_blocks(size_t k, Use use) const {
        const Slice& slice = slices_[k];
        if (element() != Element::bit) return use(data(k), int64_t{0}, slice.length);
        std::array<std::byte, 1024> bytes;
        for (int64_t first = 0; first < slice.length; first += bytes.size()) {
            const int64_t count = std::min<int64_t>(bytes.size(), slice.length - first);
            for (int64_t i = 0; i < count; ++i) {
                const int64_t bit = slice.begin + first + i;
                bytes[i] = slice.values[bit >> 3] >> (bit & 7) & std::byte{1};
            }
            use(bytes.data(), first, count);
        }
    }

  private:
    const std::byte* at(size_t k, int64_t index) const {
        const int bytes = element_bytes[static_cast<int>(element())];
        return slices_[k].values + (bytes == 0 ? index >> 3 : index * bytes);
    }

    const Column& column_;
    std::vector<Slice> slices_;
};

std::byte* slot(void* out, Output output, int64_t index) {
    return static_cast<std::byte*>(out) + index * output_bytes[static_cast<int>(output)];
}

void fill(void* out, Output output, int64_t first, int64_t last, double value) {
    const auto write = [&]<class T>(T* typed, T typed_value) { std::fill(typed + first, typed + last, typed_value); };
    switch (output) {
        case Output::boolean: return write(static_cast<bool*>(out), value != 0);
        case Output::int64: return write(static_cast<int64_t*>(out), static_cast<int64_t>(value));
        case Output::float32: return write(static_cast<float*>(out), static_cast<float>(value));
    }
}

class TokenWriter {
  public:
    TokenWriter(const TokenTask& task, const Sequences& sequences, const Kernels& kernels)
        : task_(task),
          source_(*task.column, sequences),
          convert_(kernels.convert[static_cast<int>(source_.element())][static_cast<int>(task.output)]) {}

    void prefetch(size_t k) const { source_.prefetch(k); }

    void write(size_t k, int64_t place, int64_t row) const {
        source_.for_blocks(k, [&](const std::byte* in, int64_t first, int64_t count) {
            if (!convert_(in, count, slot(task_.out, task_.output, place + first)))
                throw std::invalid_argument("row " + std::to_string(row) + " holds a value above 2^63 - 1");
        });
    }

    void pad(int64_t first, int64_t last) const { fill(task_.out, task_.output, first, last, task_.fill); }

  private:
    const TokenTask& task_;
    Source source_;
    Convert convert_;
};

class LabelWriter {
  public:
    LabelWriter(const LabelTask& task, const Sequences& sequences, const Kernels& kernels)
        : task_(task),
          kernels_(kernels),
          tokens_({task.column, task.output, task.out, static_cast<double>(task.ignore_index)}),
          writer_(tokens_, sequences, kernels) {
        for (const Column* mask : task.masks) masks_.emplace_back(*mask, sequences);
    }

    void prefetch(size_t k) const {
        writer_.prefetch(k);
        for (const Source& mask : masks_) mask.prefetch(k);
    }

    /// Returns the number of labels that are not ignore_index.
    int64_t write(size_t k, int64_t place, int64_t length, int64_t row) const {
        writer_.write(k, place, row);
        const int output = static_cast<int>(task_.output);
        for (const Source& mask : masks_) {
            const Mask apply = kernels_.mask[static_cast<int>(mask.element())][output];
            mask.for_blocks(k, [&](const std::byte* in, int64_t first, int64_t count) {
                apply(in, count, task_.ignore_index, slot(task_.out, task_.output, place + first));
            });
        }
        if (task_.mask_first && length > 0) writer_.pad(place, place + 1);
        return kernels_.count[output](slot(task_.out, task_.output, place), length, task_.ignore_index);
    }

    void pad(int64_t first, int64_t last) const { writer_.pad(first, last); }

  private:
    const LabelTask& task_;
    const Kernels& kernels_;
    TokenTask tokens_;
    TokenWriter writer_;
    std::vector<Source> masks_;
};

void check_places(const Sequences& sequences, int64_t num_slots) {
    int64_t free = 0;
    for (size_t k = 0; k < sequences.rows.size(); ++k) {
        const int64_t place = sequences.places[k], length = sequences.lengths[k];
        if (place < free || length < 0 || length > num_slots - place)
            throw std::invalid_argument("sequence " + std::to_string(k) + " of " + std::to_string(length) +
                                        " elements does not fit at slot " + std::to_string(place) + " of " +
                                        std::to_string(num_slots));
        free = place + length;
    }
}

void write_segments(const SegmentTask& task, const Kernels& kernels) {
    int32_t segment_id = 0;
    for (size_t j = 0; j + 1 < task.boundaries.size(); ++j) {
        const int64_t first = task.boundaries[j], last = task.boundaries[j + 1];
        if (first % task.slots_per_row == 0) segment_id = 0;
        kernels.positions(task.first_position, last - first, task.positions.data() + first);
        std::fill(task.segment_ids.begin() + first, task.segment_ids.begin() + last, segment_id++);
    }
}

void check_segments(const SegmentTask& task, int64_t num_slots) {
    const auto& boundaries = task.boundaries;
    const bool valid = !boundaries.empty() && boundaries.front() == 0 && boundaries.back() == num_slots &&
                       std::adjacent_find(boundaries.begin(), boundaries.end(), std::greater_equal<>()) == boundaries.end();
    if (!valid || task.slots_per_row < 1)
        throw std::invalid_argument("boundaries must increase strictly from 0 to the number of slots, " +
                                    std::to_string(num_slots));
}

}  // namespace

int64_t gather(const Batch& batch) {
    const Kernels& kernels = *kernels_in_use.load(std::memory_order_relaxed);
    const Sequences& sequences = batch.sequences;
    check_places(sequences, batch.num_slots);
    if (batch.segments) check_segments(*batch.segments, batch.num_slots);

    std::vector<TokenWriter> tokens;
    for (const TokenTask& task : batch.tokens) tokens.emplace_back(task, sequences, kernels);
    std::optional<LabelWriter> labels;
    if (batch.labels) labels.emplace(*batch.labels, sequences, kernels);

    const auto pad = [&](int64_t first, int64_t last) {
        if (first == last) return;
        for (const TokenWriter& writer : tokens) writer.pad(first, last);
        if (labels) labels->pad(first, last);
    };
    int64_t num_targets = 0;
    int64_t free = 0;
    for (size_t k = 0; k < sequences.rows.size(); ++k) {
        const int64_t place = sequences.places[k], length = sequences.lengths[k], row = sequences.rows[k];
        pad(free, place);
        for (const TokenWriter& writer : tokens) {
            writer.prefetch(k + 1);
            writer.write(k, place, row);
        }
        if (labels) {
            labels->prefetch(k + 1);
            num_targets += labels->write(k, place, length, row);
        }
        free = place + length;
    }
    pad(free, batch.num_slots);
    if (batch.segments) write_segments(*batch.segments, kernels);
    return num_targets;
}

std::vector<std::string_view> instruction_sets() {
    std::vector<std::string_view> names;
    for (const Kernels* kernels : available_kernels()) names.push_back(kernels->name);
    return names;
}

void use_instruction_set(std::string_view name) {
    for (const Kernels* kernels : available_kernels()) {
        if (kernels->name == name) return kernels_in_use.store(kernels);
    }
    throw std::invalid_argument("this machine has no instruction set " + std::string(name));
}

}  // namespace multipack
