// Gather ragged rows into flat batches: plain functions over spans, no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace multipack {

/// What a column stores, named as in numpy; `bit` is Arrow's boolean, eight to a byte.
enum class Element : uint8_t {
    bit,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
    float16,
    float32,
    float64
};

/// What a batch holds. Integers fit int64, floats become float32, bits may stay booleans (a byte each).
enum class Output : uint8_t { boolean, int64, float32 };

/// Throws std::invalid_argument for a name that is none of the elements.
Element element_named(std::string_view name);

int element_bits(Element element);

/// Where the documents of a token file lie, as Megatron's index says it: arrays of a file, which may lie at
/// any address. A row is one sequence, or the sequences groups[row] .. groups[row + 1] where there are
/// groups.
struct FileIndex {
    const std::byte* begins;   ///< int64: first byte of each sequence in the file of values
    const std::byte* lengths;  ///< int32: elements of each sequence
    int64_t num_sequences;
    const std::byte* groups;  ///< int64, one more than there are rows; nullptr: a row is a sequence
    int64_t element_bytes;

    /// Elements [begin, end) of a row. Throws std::invalid_argument where the index contradicts itself.
    std::pair<int64_t, int64_t> row(int64_t row) const;
};

/// Consecutive rows of a column as raw Arrow buffers, which are read where they lie.
struct Chunk {
    int64_t num_rows;
    const std::byte*
        offsets;  ///< of its first row; nullptr when every row has the column's `row_length` elements
    const std::byte* values;
    int64_t first_value;  ///< the element of `values` that an offset of 0 (or the first row) means
    int64_t num_values;   ///< elements that may be read from `first_value` on
    std::optional<FileIndex> index = std::nullopt;  ///< takes the place of `offsets`
};

/// The elements of one row: `length` of them from element `begin` of `values`.
struct Slice {
    const std::byte* values;
    int64_t begin;
    int64_t length;
};

/// Rows of numbers in any number of chunks. Owns no data. Immutable, hence safe to read from several threads.
class Column {
  public:
    /// `offset_bytes` is 4 or 8, or 0 when every row has `row_length` elements.
    Column(Element element, int offset_bytes, int64_t row_length, std::vector<Chunk> chunks);

    Element element() const { return element_; }
    int64_t num_rows() const { return first_rows_.back(); }

    /// Throws std::out_of_range for a row that is not there, std::invalid_argument where the offsets decrease
    /// or leave the values: memory outside the chunk is never read.
    Slice row(int64_t row) const;

  private:
    Element element_;
    int offset_bytes_;
    int64_t row_length_;
    std::vector<Chunk> chunks_;
    std::vector<int64_t> first_rows_;  // of each chunk, and one more
    std::vector<int32_t> bucket_;  // chunk that holds row b << shift_, so that few chunks are left to search
    int shift_ = 0;
};

/// Writes the length of each row. Throws as Column::row.
void row_lengths(const Column& column, std::span<const int64_t> rows, std::span<int64_t> lengths);

/// The sequences of a batch: elements starts[k] .. starts[k] + lengths[k] of row rows[k] go to the slots from
/// places[k] on. `starts` may be empty (all zero). Places ascend and sequences do not overlap; the slots
/// between them are padding.
struct Sequences {
    std::span<const int64_t> rows, starts, lengths, places;
};

/// One output of a batch: the elements of `column`, and `fill` in the padding.
struct TokenTask {
    const Column* column;
    Output output;
    void* out;
    double fill;
};

/// Labels: the elements of `column` where every mask is nonzero, else `ignore_index`, as also in the padding.
struct LabelTask {
    const Column* column;
    std::vector<const Column*> masks;
    Output output;  // int64 or float32
    void* out;
    int64_t ignore_index;
    bool mask_first;  // the first label of each sequence is ignore_index
};

/// Positions and sequence numbers. Segment j fills slots boundaries[j] .. boundaries[j + 1]; padding is a
/// segment too.
struct SegmentTask {
    std::vector<int32_t> boundaries;  // strictly increasing from 0 to the number of slots
    std::span<int64_t> positions;     // first_position, first_position + 1, ... in each segment
    std::span<int32_t> segment_ids;   // 0, 1, ..., from 0 again at each multiple of slots_per_row
    int64_t first_position;
    int64_t slots_per_row;
};

struct Batch {
    Sequences sequences;
    int64_t num_slots = 0;
    std::vector<TokenTask> tokens;
    std::optional<LabelTask> labels;
    std::optional<SegmentTask> segments;
};

/// Writes all outputs of a batch, each once, and returns the number of labels that are not ignore_index.
/// Throws std::invalid_argument where a sequence leaves its row or its slots, or does not fit the output
/// type.
int64_t gather(const Batch& batch);

/// Instruction sets this machine can run, widest last ("baseline", "avx2"); the widest is used.
std::vector<std::string_view> instruction_sets();

/// Use another one of them, for tests and measurements. Throws std::invalid_argument for one that is not
/// there.
void use_instruction_set(std::string_view name);

}  // namespace multipack
