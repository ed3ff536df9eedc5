// Columns and batches whose offsets, rows and places are mostly right and sometimes anything.
#include <span>
#include <vector>

#include "gather.h"
#include "targets.h"

using namespace multipack;

namespace {

/// A column of a few chunks whose offsets are mostly right and sometimes anything.
struct AnyColumn {
    std::vector<std::vector<std::byte>> buffers;
    std::vector<Chunk> chunks;
    Element element;
    int offset_bytes;
    int64_t row_length;

    explicit AnyColumn(Bytes& bytes)
        : element(static_cast<Element>(bytes.between(0, 11))),
          offset_bytes(static_cast<int>(4 * bytes.between(0, 2))),
          row_length(offset_bytes > 0 && bytes.once_in(4) ? std::max<int64_t>(0, bytes.anything())
                                                          : bytes.between(0, 5)) {
        const bool corrupt = bytes.once_in(2);
        for (int64_t c = bytes.between(0, 3); c > 0; --c) {
            const int64_t num_rows = bytes.between(0, 6), first = bytes.between(0, 9);
            int64_t num_values = offset_bytes == 0 ? num_rows * row_length : bytes.between(0, 40);
            if (row_length == 0 && offset_bytes == 0 && bytes.once_in(9)) {  // such rows need no memory
                chunks.push_back({std::max<int64_t>(0, bytes.anything()), nullptr, nullptr, 0, 0});
                continue;
            }
            std::vector<int64_t> ends{0};
            for (int64_t row = 0; row < num_rows; ++row) {
                const int64_t end = std::min(num_values, ends.back() + bytes.between(0, 9));
                ends.push_back(corrupt && bytes.once_in(5) ? bytes.anything() : end);
            }
            chunks.push_back({num_rows, offsets(ends), values(bytes, first + num_values), first, num_values});
        }
    }

    Column column() const { return Column(element, offset_bytes, row_length, chunks); }

  private:
    const std::byte* hold(std::vector<std::byte> buffer) {
        buffers.push_back(std::move(buffer));
        return buffers.back().empty() ? nullptr : buffers.back().data();
    }

    const std::byte* offsets(const std::vector<int64_t>& ends) {
        if (offset_bytes == 0) return nullptr;
        std::vector<std::byte> buffer(ends.size() * offset_bytes);
        for (size_t i = 0; i < ends.size(); ++i)
            std::memcpy(&buffer[i * offset_bytes], &ends[i], offset_bytes);
        return hold(std::move(buffer));
    }

    const std::byte* values(Bytes& bytes, int64_t count) {
        std::vector<std::byte> buffer((count * element_bits(element) + 7) / 8);
        const uint64_t pattern = bytes.number();
        for (size_t i = 0; i < buffer.size(); ++i) buffer[i] = static_cast<std::byte>(pattern >> i % 8);
        return hold(std::move(buffer));
    }
};

template <class T>
void* out_of(std::vector<std::vector<std::byte>>& outs, int64_t num_slots) {
    outs.emplace_back(num_slots * sizeof(T));
    return outs.back().data();
}

void* any_out(std::vector<std::vector<std::byte>>& outs, Output output, int64_t num_slots) {
    if (output == Output::int64) return out_of<int64_t>(outs, num_slots);
    if (output == Output::float32) return out_of<float>(outs, num_slots);
    return out_of<bool>(outs, num_slots);
}

/// Rows, places and outputs of a batch; mostly such that they fit.
int64_t gather_any(Bytes& bytes, const std::vector<const Column*>& columns) {
    const Column& first = *columns.front();
    std::vector<int64_t> rows, starts, lengths, places;
    int64_t free = 0;
    for (int64_t k = bytes.between(0, 6); k > 0 && first.num_rows() > 0; --k) {
        rows.push_back(bytes.once_in(20) ? bytes.anything() : bytes.between(0, first.num_rows() - 1));
        std::vector<int64_t> length(1);
        row_lengths(first, std::span(rows).last(1), length);
        starts.push_back(bytes.between(0, length[0]));
        lengths.push_back(bytes.once_in(20) ? static_cast<int64_t>(bytes.number())
                                            : length[0] - starts.back());
        places.push_back(bytes.once_in(20) ? static_cast<int64_t>(bytes.number())
                                           : free + bytes.between(0, 3));
        free = std::clamp<int64_t>(places.back(), 0, 1000) + std::clamp<int64_t>(lengths.back(), 0, 1000);
    }
    Batch batch;
    batch.num_slots =
        bytes.once_in(10) ? bytes.between(0, 50) : std::min<int64_t>(free, 5000) + bytes.between(0, 9);
    batch.sequences = {rows, bytes.once_in(3) ? std::span<int64_t>() : std::span(starts), lengths, places};
    std::vector<std::vector<std::byte>> outs;
    for (const Column* column : columns) {
        const Output output = static_cast<Output>(bytes.between(0, 2));
        const double fill = bytes.once_in(20) ? static_cast<double>(bytes.number()) : -1.0;
        batch.tokens.push_back({column, output, any_out(outs, output, batch.num_slots), fill});
    }
    if (bytes.once_in(2)) {
        const Output output = bytes.once_in(3) ? Output::float32 : Output::int64;
        const std::vector<const Column*> masks(columns.begin() + 1, columns.end());
        batch.labels = {&first,           masks,           output, any_out(outs, output, batch.num_slots),
                        bytes.anything(), bytes.once_in(2)};
    }
    std::vector<int32_t> boundaries{0};
    while (boundaries.back() < batch.num_slots && !bytes.once_in(30))
        boundaries.push_back(
            static_cast<int32_t>(boundaries.back() + bytes.between(bytes.once_in(30) ? 0 : 1, 9)));
    if (bytes.once_in(2)) boundaries.back() = static_cast<int32_t>(batch.num_slots);
    std::vector<int64_t> positions(batch.num_slots);
    std::vector<int32_t> segment_ids(batch.num_slots);
    if (bytes.once_in(2)) batch.segments = {boundaries, positions, segment_ids, 0, bytes.between(0, 20)};
    return gather(batch);
}

}  // namespace

void fuzz_gather(Bytes& bytes) {
    std::vector<AnyColumn> any;
    for (int64_t count = bytes.between(1, 3); count > 0; --count) any.emplace_back(bytes);
    std::vector<Column> columns;
    std::vector<const Column*> pointers;
    for (const AnyColumn& one : any) columns.push_back(one.column());
    for (const Column& column : columns) pointers.push_back(&column);
    const auto sets = instruction_sets();
    use_instruction_set(sets[bytes.between(0, static_cast<int64_t>(sets.size()) - 1)]);
    gather_any(bytes, pointers);
}
