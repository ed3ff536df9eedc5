// Fuzz target of the kernels: whatever the bytes say, an answer that holds or an exception, and no memory but its own.
//
// With clang: clang++ -fsanitize=fuzzer,address,undefined -DMULTIPACK_LIBFUZZER ...; without, `main` makes the bytes from a seed.
// All arrays have exactly the size that is promised, so that the address sanitizer sees the first byte beside them.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "gather.h"
#include "packing.h"
#include "permute.h"
#include "stream.h"

namespace {

using namespace multipack;

/// Numbers from a string of bytes; zeros when it is used up.
class Bytes {
  public:
    Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

    uint64_t number() {
        uint64_t value = 0;
        const size_t taken = std::min(sizeof value, size_);
        if (taken > 0) std::memcpy(&value, data_, taken);
        data_ += taken;
        size_ -= taken;
        return value;
    }

    int64_t between(int64_t low, int64_t high) {
        return low + static_cast<int64_t>(number() % static_cast<uint64_t>(high - low + 1));
    }

    bool once_in(int64_t times) { return between(1, times) == 1; }

  private:
    const uint8_t* data_;
    size_t size_;
};

void check(bool holds, const char* what) {
    if (holds) return;
    std::fprintf(stderr, "broken: %s\n", what);
    std::abort();
}

void check_bins(int64_t num_bins, const std::vector<int32_t>& lengths, int64_t capacity, int64_t limit,
                const std::vector<int64_t>& offsets, const std::vector<int32_t>& indices) {
    check(num_bins >= 0 && num_bins <= static_cast<int64_t>(lengths.size()), "number of bins");
    check(offsets[0] == 0 && offsets[num_bins] == static_cast<int64_t>(lengths.size()), "ends of the bins");
    std::vector<int> seen(lengths.size(), 0);
    for (int64_t b = 0; b < num_bins; ++b) {
        int64_t used = 0;
        check(offsets[b] < offsets[b + 1], "an empty bin");
        for (int64_t i = offsets[b]; i < offsets[b + 1]; ++i) {
            ++seen[indices[i]];
            used += lengths[indices[i]];
        }
        check(used <= capacity && offsets[b + 1] - offsets[b] <= limit, "an overfull bin");
    }
    check(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }), "each row once");
}

void fuzz_pack(Bytes& bytes) {
    const int32_t capacity = static_cast<int32_t>(bytes.between(1, bytes.once_in(8) ? 5000 : 200));
    const int64_t limit = bytes.once_in(2) ? kNoLimit : bytes.between(1, 6);
    const int64_t longest = bytes.between(1, capacity);
    std::vector<int32_t> lengths(bytes.between(0, 90));
    for (int32_t& length : lengths) length = static_cast<int32_t>(bytes.between(1, longest));
    const uint64_t seed = bytes.number();
    const auto run = [&](auto packer) {
        std::vector<int64_t> offsets(lengths.size() + 1);
        std::vector<int32_t> indices(lengths.size());
        const int64_t num_bins = packer(offsets, indices);
        check_bins(num_bins, lengths, capacity, limit, offsets, indices);
        shuffle_bins(0, num_bins, seed, offsets, indices);
        check_bins(num_bins, lengths, capacity, limit, offsets, indices);
        return num_bins;
    };
    std::vector<int64_t> counts(capacity + 1);
    histogram(lengths, counts);
    const int64_t bound = lower_bound(counts, capacity, limit);
    const int32_t pool_size = static_cast<int32_t>(bytes.between(1, 100));
    const int64_t bins[] = {
        run([&](auto& offsets, auto& indices) { return next_fit(lengths, capacity, limit, offsets, indices); }),
        run([&](auto& offsets, auto& indices) {
            return best_fit_decreasing(lengths, capacity, limit, seed, offsets, indices);
        }),
        run([&](auto& offsets, auto& indices) {
            return stream(lengths, capacity, limit, seed, pool_size, 0.0, offsets, indices);
        }),
        run([&](auto& offsets, auto& indices) { return pack_auto(lengths, capacity, limit, seed, offsets, indices); }),
    };
    for (int64_t num_bins : bins) check(num_bins >= bound, "fewer bins than the bound");
    check(bins[1] == best_fit_decreasing_bins(counts, capacity, limit), "bins of a histogram");
}

void fuzz_pool(Bytes& bytes) {
    const int32_t capacity = static_cast<int32_t>(bytes.between(1, 300));
    const int32_t pool_size = static_cast<int32_t>(bytes.between(1, 40));
    const int64_t limit = bytes.once_in(2) ? kNoLimit : bytes.between(1, 6);
    const uint64_t seed = bytes.number();
    StreamPool pool(capacity, pool_size, limit, seed);
    std::vector<int64_t> lengths, seen;
    for (int64_t step = bytes.between(0, 120); step > 0; --step) {
        if (!pool.full() && !bytes.once_in(4)) {
            lengths.push_back(bytes.between(1, capacity));
            pool.push(static_cast<int64_t>(lengths.size()) - 1, static_cast<int32_t>(lengths.back()));
        } else if (pool.size() > 0) {
            StreamPool twin(capacity, pool_size, limit, 0);
            twin.restore(pool.state());
            const auto lead = bytes.once_in(2) ? StreamPool::Lead::kLongest : StreamPool::Lead::kOldest;
            std::vector<int64_t> ids, other;
            const int32_t used = pool.fill(lead, ids);
            twin.fill(lead, other);
            check(ids == other, "a restored pool fills the same bin");
            int64_t sum = 0;
            for (int64_t id : ids) sum += lengths[id];
            check(!ids.empty() && sum == used && used <= capacity, "tokens of a bin of the pool");
            check(static_cast<int64_t>(ids.size()) <= limit, "sequences of a bin of the pool");
            seen.insert(seen.end(), ids.begin(), ids.end());
        }
    }
    std::sort(seen.begin(), seen.end());
    check(std::adjacent_find(seen.begin(), seen.end()) == seen.end(), "a sequence twice");
    check(static_cast<int64_t>(seen.size() + pool.size()) == static_cast<int64_t>(lengths.size()), "a sequence lost");
}

void fuzz_permutation(Bytes& bytes) {
    const int64_t num_rows = bytes.between(1, 300), block = bytes.between(1, 20);
    const uint64_t seed = bytes.number();
    std::vector<int64_t> seen;
    for (int64_t start = 0; start < num_rows;) {
        std::vector<int64_t> rows(std::min(num_rows - start, block * bytes.between(1, 9)));
        permuted_rows(num_rows, block, seed, start, rows);
        seen.insert(seen.end(), rows.begin(), rows.end());
        start += static_cast<int64_t>(rows.size());
    }
    std::sort(seen.begin(), seen.end());
    std::vector<int64_t> all(num_rows);
    std::iota(all.begin(), all.end(), 0);
    check(seen == all, "each row of the permutation once");
}

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
          row_length(bytes.between(0, 5)) {
        const bool corrupt = bytes.once_in(2);
        for (int64_t c = bytes.between(0, 3); c > 0; --c) {
            const int64_t num_rows = bytes.between(0, 6), first = bytes.between(0, 9);
            int64_t num_values = offset_bytes == 0 ? num_rows * row_length : bytes.between(0, 40);
            std::vector<int64_t> ends{0};
            for (int64_t row = 0; row < num_rows; ++row) {
                const int64_t end = std::min(num_values, ends.back() + bytes.between(0, 9));
                ends.push_back(corrupt && bytes.once_in(5) ? anything(bytes) : end);
            }
            chunks.push_back({num_rows, offsets(ends), values(bytes, first + num_values), first, num_values});
        }
    }

    Column column() const { return Column(element, offset_bytes, row_length, chunks); }

  private:
    static int64_t anything(Bytes& bytes) {
        return bytes.once_in(2) ? static_cast<int64_t>(bytes.number()) : bytes.between(-3, 60);
    }

    const std::byte* hold(std::vector<std::byte> buffer) {
        buffers.push_back(std::move(buffer));
        return buffers.back().empty() ? nullptr : buffers.back().data();
    }

    const std::byte* offsets(const std::vector<int64_t>& ends) {
        if (offset_bytes == 0) return nullptr;
        std::vector<std::byte> buffer(ends.size() * offset_bytes);
        for (size_t i = 0; i < ends.size(); ++i) std::memcpy(&buffer[i * offset_bytes], &ends[i], offset_bytes);
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
        rows.push_back(bytes.once_in(20) ? bytes.between(-9, first.num_rows() + 9) : bytes.between(0, first.num_rows() - 1));
        std::vector<int64_t> length(1);
        row_lengths(first, std::span(rows).last(1), length);
        starts.push_back(bytes.between(0, length[0]));
        lengths.push_back(bytes.once_in(20) ? static_cast<int64_t>(bytes.number()) : length[0] - starts.back());
        places.push_back(bytes.once_in(20) ? static_cast<int64_t>(bytes.number()) : free + bytes.between(0, 3));
        free = std::clamp<int64_t>(places.back(), 0, 1000) + std::clamp<int64_t>(lengths.back(), 0, 1000);
    }
    Batch batch;
    batch.num_slots = bytes.once_in(10) ? bytes.between(0, 50) : std::min<int64_t>(free, 5000) + bytes.between(0, 9);
    batch.sequences = {rows, bytes.once_in(3) ? std::span<int64_t>() : std::span(starts), lengths, places};
    std::vector<std::vector<std::byte>> outs;
    for (const Column* column : columns) {
        const Output output = static_cast<Output>(bytes.between(0, 2));
        batch.tokens.push_back({column, output, any_out(outs, output, batch.num_slots), -1.0});
    }
    if (bytes.once_in(2)) {
        const Output output = bytes.once_in(3) ? Output::float32 : Output::int64;
        const std::vector<const Column*> masks(columns.begin() + 1, columns.end());
        batch.labels = {&first, masks, output, any_out(outs, output, batch.num_slots), -100, bytes.once_in(2)};
    }
    std::vector<int32_t> boundaries{0};
    while (boundaries.back() < batch.num_slots && !bytes.once_in(30))
        boundaries.push_back(static_cast<int32_t>(boundaries.back() + bytes.between(bytes.once_in(30) ? 0 : 1, 9)));
    if (bytes.once_in(2)) boundaries.back() = static_cast<int32_t>(batch.num_slots);
    std::vector<int64_t> positions(batch.num_slots);
    std::vector<int32_t> segment_ids(batch.num_slots);
    if (bytes.once_in(2)) batch.segments = {boundaries, positions, segment_ids, 0, bytes.between(0, 20)};
    return gather(batch);
}

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

/// Whether the case ended without an exception.
bool run_case(const uint8_t* data, size_t size) {
    Bytes bytes(data, size);
    try {
        switch (bytes.between(0, 5)) {
            case 0:
                fuzz_pack(bytes);
                break;
            case 1:
                fuzz_pool(bytes);
                break;
            case 2:
                fuzz_permutation(bytes);
                break;
            default:
                fuzz_gather(bytes);
        }
        return true;
    } catch (const std::invalid_argument&) {
    } catch (const std::out_of_range&) {
    }
    return false;
}

}  // namespace

#ifdef MULTIPACK_LIBFUZZER
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    run_case(data, size);
    return 0;
}
#else
/// fuzz SECONDS SEED [THREADS]: random cases for so long, in several threads that read the same bytes.
int main(int argc, char** argv) {
    if (argc < 3) {
        std::fprintf(stderr, "usage: %s SECONDS SEED [THREADS]\n", argv[0]);
        return 2;
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(std::atof(argv[1]));
    const uint64_t seed = std::strtoull(argv[2], nullptr, 10);
    const int num_threads = argc > 3 ? std::atoi(argv[3]) : 1;
    std::atomic<int64_t> held{0}, refused{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < num_threads; ++t) {
        threads.emplace_back([&, t] {
            std::mt19937_64 random(seed + t);
            while (std::chrono::steady_clock::now() < deadline) {
                std::vector<uint64_t> words(200 + random() % 400);
                for (uint64_t& word : words) word = random();
                (run_case(reinterpret_cast<const uint8_t*>(words.data()), words.size() * 8) ? held : refused)++;
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    std::printf("%lld cases held, %lld were refused\n", static_cast<long long>(held), static_cast<long long>(refused));
    return held > 100 && refused > 100 ? 0 : 1;
}
#endif
