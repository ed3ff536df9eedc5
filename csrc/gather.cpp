#include "gather.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>
#include <tuple>

#include "kernels.h"

namespace multipack {
namespace {

constexpr std::array<std::string_view, kNumElements> element_names{"bit",    "int8",    "int16",   "int32",
                                                                   "int64",  "uint8",   "uint16",  "uint32",
                                                                   "uint64", "float16", "float32", "float64"};

constexpr std::array<int, kNumElements> element_bytes{0, 1, 2, 4, 8, 1, 2, 4, 8, 2, 4, 8};
constexpr std::array<int, kNumOutputs> output_bytes{1, 8, 4};

/// How many sequences ahead values are asked for.
constexpr size_t kAhead = 4;

constexpr int index(Element element) { return static_cast<int>(element); }
constexpr int index(Output output) { return static_cast<int>(output); }

int64_t load_offset(const Chunk& chunk, int offset_bytes, int64_t row) {
    return offset_bytes == 4 ? load<int32_t>(chunk.offsets, row) : load<int64_t>(chunk.offsets, row);
}

[[noreturn]] void throw_corrupt(int64_t row, int64_t begin, int64_t end, int64_t num_values) {
    throw std::invalid_argument("row " + std::to_string(row) + " has offsets " + std::to_string(begin) +
                                ".." + std::to_string(end) + " into " + std::to_string(num_values) +
                                " values: the column is corrupt; write the data set again");
}

}  // namespace

Element element_named(std::string_view name) {
    const auto found = std::find(element_names.begin(), element_names.end(), name);
    if (found == element_names.end())
        throw std::invalid_argument("unknown element type " + std::string(name));
    return static_cast<Element>(found - element_names.begin());
}

int element_bits(Element element) { return std::max(1, 8 * element_bytes[index(element)]); }

std::pair<int64_t, int64_t> FileIndex::row(int64_t row) const {
    const int64_t first = groups ? load<int64_t>(groups, row) : row;
    const int64_t last = groups ? load<int64_t>(groups, row + 1) : row + 1;
    if (first < 0 || last < first || last > num_sequences)
        throw std::invalid_argument("row " + std::to_string(row) + " is made of the sequences " +
                                    std::to_string(first) + ".." + std::to_string(last) + " of " +
                                    std::to_string(num_sequences) + ": the index is corrupt");
    if (first == last) return {0, 0};
    const int64_t begin_byte = load<int64_t>(begins, first), last_byte = load<int64_t>(begins, last - 1);
    if (begin_byte < 0 || begin_byte % element_bytes != 0 || last_byte < begin_byte ||
        last_byte % element_bytes != 0 || last_byte / element_bytes > INT64_MAX - INT32_MAX)
        throw std::invalid_argument("row " + std::to_string(row) + " begins at byte " +
                                    std::to_string(begin_byte) + " and its last sequence at byte " +
                                    std::to_string(last_byte) + ", with elements of " +
                                    std::to_string(element_bytes) + " bytes: the index is corrupt");
    return {begin_byte / element_bytes, last_byte / element_bytes + load<int32_t>(lengths, last - 1)};
}

Column::Column(Element element, int offset_bytes, int64_t row_length, std::vector<Chunk> chunks)
    : element_(element), offset_bytes_(offset_bytes), row_length_(row_length) {
    int64_t num_rows = 0;
    for (const Chunk& chunk : chunks) {
        if (chunk.num_rows == 0) continue;
        if (chunk.num_rows > INT64_MAX - num_rows)
            throw std::invalid_argument("the chunks have more rows than 64 bits count");
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
        throw std::out_of_range("row " + std::to_string(row) + " is outside 0.." +
                                std::to_string(num_rows() - 1));
    const int64_t bucket = row >> shift_;
    const auto first = first_rows_.begin() + bucket_[bucket] + 1;
    const auto last = first_rows_.begin() + bucket_[bucket + 1] + 1;
    const int64_t chunk_index = std::upper_bound(first, last, row) - first_rows_.begin() - 1;
    const Chunk& chunk = chunks_[chunk_index];
    const int64_t local = row - first_rows_[chunk_index];
    int64_t begin, end;
    if (chunk.index) {
        std::tie(begin, end) = chunk.index->row(local);
    } else if (offset_bytes_ == 0) {
        begin = local * row_length_;
        end = begin + row_length_;
    } else {
        begin = load_offset(chunk, offset_bytes_, local);
        end = load_offset(chunk, offset_bytes_, local + 1);
    }
    if (begin < 0 || end < begin || end > chunk.num_values) throw_corrupt(row, begin, end, chunk.num_values);
    return {chunk.values, chunk.first_value + begin, end - begin};
}

void row_lengths(const Column& column, std::span<const int64_t> rows, std::span<int64_t> lengths) {
    for (size_t k = 0; k < rows.size(); ++k) lengths[k] = column.row(rows[k]).length;
}

namespace {

/// Bytes for some elements of a sequence, few enough to stay in the first cache.
using Block = std::array<std::byte, 1024>;

/// Calls `use(first, count)` for each block of a sequence.
template <class Use>
void for_blocks(int64_t length, Use use) {
    constexpr int64_t size = std::tuple_size_v<Block>;
    for (int64_t first = 0; first < length; first += size) use(first, std::min(size, length - first));
}

/// The elements of one column that the sequences of a batch need, found before any is copied: the cache
/// misses on the offsets overlap, and the values of the next sequences can be fetched while one is copied.
class Source {
  public:
    Source(const Column& column, const Sequences& sequences)
        : column_(column), slices_(sequences.rows.size()) {
        for (size_t k = 0; k < slices_.size(); ++k) {
            Slice slice = column.row(sequences.rows[k]);
            const int64_t start = sequences.starts.empty() ? 0 : sequences.starts[k];
            const int64_t length = sequences.lengths[k];
            if (start < 0 || length < 0 || start > slice.length || length > slice.length - start)
                throw std::invalid_argument("row " + std::to_string(sequences.rows[k]) + " has " +
                                            std::to_string(slice.length) + " elements, but " +
                                            std::to_string(length) + " from " + std::to_string(start) +
                                            " on were asked for");
            slices_[k] = {slice.values, slice.begin + start, length};
        }
    }

    Element element() const { return column_.element(); }
    const std::byte* data(size_t k) const { return at(k, slices_[k].begin); }

    /// Ask for the first 4 KiB of sequence k; the processor streams on by itself. Always inlined, because gcc
    /// takes a function that only prefetches for one without effect and drops the call.
    MULTIPACK_INLINE void prefetch(size_t k) const {
#if defined(__GNUC__)
        if (k >= slices_.size()) return;
        constexpr int64_t line = 64, most = 64 * line;
        const std::byte* begin = data(k);
        const int64_t bytes = std::min(most, at(k, slices_[k].begin + slices_[k].length) - begin);
        for (int64_t i = 0; i < bytes; i += line) __builtin_prefetch(begin + i);
#endif
    }

    /// Elements `first` to `first + count` of sequence k; bits are unpacked to bytes in `block`.
    const std::byte* elements(size_t k, int64_t first, int64_t count, Block& block) const {
        const int64_t begin = slices_[k].begin + first;
        if (element() != Element::bit) return at(k, begin);
        unpack_bits(slices_[k].values, begin, count, block.data());
        return block.data();
    }

  private:
    const std::byte* at(size_t k, int64_t element_index) const {
        const int bytes = element_bytes[index(element())];
        return slices_[k].values + (bytes == 0 ? element_index >> 3 : element_index * bytes);
    }

    const Column& column_;
    std::vector<Slice> slices_;
};

std::byte* slot(void* out, Output output, int64_t number) {
    return static_cast<std::byte*>(out) + number * output_bytes[index(output)];
}

template <class Value>
void fill(void* out, Output output, int64_t first, int64_t last, Value value) {
    const auto write = [&]<class T>(T* typed, T typed_value) {
        std::fill(typed + first, typed + last, typed_value);
    };
    switch (output) {
        case Output::boolean:
            return write(static_cast<bool*>(out), value != 0);
        case Output::int64:
            return write(static_cast<int64_t*>(out), static_cast<int64_t>(value));
        case Output::float32:
            return write(static_cast<float*>(out), static_cast<float>(value));
    }
}

/// Calls write(k) for each sequence and pad(first, last) for the slots between them.
template <class Write, class Pad>
void for_sequences(const Sequences& sequences, int64_t num_slots, Write write, Pad pad) {
    int64_t free = 0;
    for (size_t k = 0; k < sequences.rows.size(); ++k) {
        if (free < sequences.places[k]) pad(free, sequences.places[k]);
        write(k);
        free = sequences.places[k] + sequences.lengths[k];
    }
    if (free < num_slots) pad(free, num_slots);
}

void check_fits(const Source& source, const std::byte* in, int64_t count, int64_t row) {
    if (source.element() != Element::uint64) return;
    for (int64_t i = 0; i < count; ++i) {
        if (load<uint64_t>(in, i) >> 63 != 0)
            throw std::invalid_argument("row " + std::to_string(row) + " holds a value above 2^63 - 1");
    }
}

template <class Kernel>
Kernel checked(Kernel kernel) {
    if (kernel == nullptr) throw std::invalid_argument("a column of floats cannot become int64");
    return kernel;
}

void check_fill(const TokenTask& task) {
    constexpr double limit = 9223372036854775808.0;  // 2^63
    if (task.output == Output::int64 && !(-limit <= task.fill && task.fill < limit))
        throw std::invalid_argument("the padding " + std::to_string(task.fill) + " does not fit int64");
}

void write_tokens(const TokenTask& task, const Sequences& sequences, int64_t num_slots,
                  const Kernels& kernels) {
    check_fill(task);
    const Source source(*task.column, sequences);
    const Convert convert = checked(kernels.convert[index(source.element())][index(task.output)]);
    const auto write = [&](size_t k) {
        source.prefetch(k + kAhead);
        for_blocks(sequences.lengths[k], [&](int64_t first, int64_t count) {
            Block block;
            const std::byte* in = source.elements(k, first, count, block);
            check_fits(source, in, count, sequences.rows[k]);
            convert(in, count, slot(task.out, task.output, sequences.places[k] + first));
        });
    };
    const auto pad = [&](int64_t first, int64_t last) {
        fill(task.out, task.output, first, last, task.fill);
    };
    for_sequences(sequences, num_slots, write, pad);
}

/// Which elements of a block all masks keep, as bytes; nullptr when there is no mask.
const std::byte* kept_by_all(const std::vector<Source>& masks, size_t k, int64_t first, int64_t count,
                             const Kernels& kernels, Block& kept) {
    for (const Source& mask : masks) {
        const Convert to_bytes = kernels.convert[index(mask.element())][index(Output::boolean)];
        Block bits, bytes;
        to_bytes(mask.elements(k, first, count, bits), count, bytes.data());
        if (&mask == &masks.front())
            kept = bytes;
        else
            for (int64_t i = 0; i < count; ++i) kept[i] &= bytes[i];
    }
    return masks.empty() ? nullptr : kept.data();
}

int64_t write_labels(const LabelTask& task, const Sequences& sequences, int64_t num_slots,
                     const Kernels& kernels) {
    const Source source(*task.column, sequences);
    const Label label = checked(kernels.label[index(source.element())][index(task.output)]);
    std::vector<Source> masks;
    for (const Column* mask : task.masks) masks.emplace_back(*mask, sequences);
    const auto ignore = [&](int64_t first, int64_t last) {
        fill(task.out, task.output, first, last, task.ignore_index);
    };
    int64_t num_targets = 0;
    const auto write = [&](size_t k) {
        const int64_t place = sequences.places[k], length = sequences.lengths[k];
        const int64_t ignored = task.mask_first && length > 0;
        source.prefetch(k + kAhead);
        for (const Source& mask : masks) mask.prefetch(k + kAhead);
        ignore(place, place + ignored);
        for_blocks(length - ignored, [&](int64_t first, int64_t count) {
            Block block, kept;
            first += ignored;
            const std::byte* in = source.elements(k, first, count, block);
            check_fits(source, in, count, sequences.rows[k]);
            const std::byte* keep = kept_by_all(masks, k, first, count, kernels, kept);
            num_targets +=
                label(in, keep, count, task.ignore_index, slot(task.out, task.output, place + first));
        });
    };
    for_sequences(sequences, num_slots, write, ignore);
    return num_targets;
}

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
    const bool valid =
        !boundaries.empty() && boundaries.front() == 0 && boundaries.back() == num_slots &&
        std::adjacent_find(boundaries.begin(), boundaries.end(), std::greater_equal<>()) == boundaries.end();
    if (!valid || task.slots_per_row < 1)
        throw std::invalid_argument("boundaries must increase strictly from 0 to the number of slots, " +
                                    std::to_string(num_slots));
}

}  // namespace

int64_t gather(const Batch& batch) {
    const Kernels& kernels = *kernels_in_use.load(std::memory_order_relaxed);
    check_places(batch.sequences, batch.num_slots);
    if (batch.segments) check_segments(*batch.segments, batch.num_slots);
    for (const TokenTask& task : batch.tokens) write_tokens(task, batch.sequences, batch.num_slots, kernels);
    if (batch.segments) write_segments(*batch.segments, kernels);
    return batch.labels ? write_labels(*batch.labels, batch.sequences, batch.num_slots, kernels) : 0;
}

std::vector<std::string_view> instruction_sets() {
    std::vector<std::string_view> names;
    for (const Kernels& kernels : available_kernels()) names.push_back(kernels.name);
    return names;
}

void use_instruction_set(std::string_view name) {
    for (const Kernels& kernels : available_kernels()) {
        if (kernels.name == name) return kernels_in_use.store(&kernels);
    }
    throw std::invalid_argument("this machine has no instruction set " + std::string(name));
}

}  // namespace multipack
