#include "checks.h"

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <string>

#include "packing.h"
#include "permute.h"

namespace multipack {

namespace {

template <class A, class B>
bool overlap(std::span<A> a, std::span<B> b) {
    const auto bytes_a = std::as_bytes(a), bytes_b = std::as_bytes(b);
    const std::less<> before;
    return before(bytes_a.data(), bytes_b.data() + bytes_b.size()) &&
           before(bytes_b.data(), bytes_a.data() + bytes_a.size());
}

void check_range(const char* name, int64_t value, int64_t most) {
    if (value < 1 || value > most)
        throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", outside 1.." +
                                    std::to_string(most));
}

void check_limits(int32_t capacity, int64_t max_sequences) {
    check_range("capacity", capacity, kMaxCapacity);
    check_range("max_sequences", max_sequences, kNoLimit);
}

}  // namespace

void check_packing(std::span<const int32_t> lengths, int32_t capacity, int64_t max_sequences,
                   std::span<const int64_t> offsets, std::span<const int32_t> indices) {
    check_limits(capacity, max_sequences);
    if (lengths.size() > INT32_MAX)
        throw std::invalid_argument("at most 2^31 - 1 sequences can be packed at once");
    if (offsets.size() < lengths.size() + 1 || indices.size() < lengths.size())
        throw std::invalid_argument("offsets or indices are too short for the lengths");
    if (overlap(lengths, offsets) || overlap(lengths, indices) || overlap(offsets, indices))
        throw std::invalid_argument("lengths, offsets and indices must not share memory");
    // One pass without branches; the row is sought only when there is one.
    uint32_t worst = 0;
    for (int32_t length : lengths) worst = std::max(worst, static_cast<uint32_t>(length) - 1u);
    if (worst < static_cast<uint32_t>(capacity)) return;
    for (size_t row = 0; row < lengths.size(); ++row) {
        if (lengths[row] < 1 || lengths[row] > capacity)
            throw std::invalid_argument("row " + std::to_string(row) + " has length " +
                                        std::to_string(lengths[row]) + ", outside 1.." +
                                        std::to_string(capacity));
    }
}

void check_counts(std::span<const int64_t> counts, int32_t capacity, int64_t max_sequences) {
    check_limits(capacity, max_sequences);
    if (counts.size() != static_cast<size_t>(capacity) + 1)
        throw std::invalid_argument("counts must hold capacity + 1 numbers");
    int64_t tokens = 0;
    for (int64_t length = 0; length <= capacity; ++length) {
        const int64_t count = counts[length];
        if (count < 0 || (length > 0 && count > (INT64_MAX - tokens) / length))
            throw std::invalid_argument("counts must not be negative, nor stand for 2^63 tokens or more");
        tokens += count * length;
    }
}

void check_pool(int32_t capacity, int32_t pool_size, int64_t max_sequences) {
    check_limits(capacity, max_sequences);
    check_range("pool_size", pool_size, kMaxPoolSize);
}

void check_state(const StreamPool& pool, const StreamPool::State& state) {
    constexpr int64_t most = int64_t{1} << 62;  // beyond it the next bins would overflow
    const size_t size = state.ids.size();
    const auto fits = [&](int32_t length) { return 1 <= length && length <= pool.capacity(); };
    if (pool.size() != 0 || size > static_cast<size_t>(pool.pool_size()) || state.arrivals.size() != size ||
        state.lengths.size() != size || !std::all_of(state.lengths.begin(), state.lengths.end(), fits))
        throw std::invalid_argument("the state does not fit this pool");
    const auto& arrivals = state.arrivals;
    const int64_t first = arrivals.empty() ? 0 : arrivals.front(),
                  last = arrivals.empty() ? 0 : arrivals.back();
    if (!std::is_sorted(arrivals.begin(), arrivals.end()) || first < 0 || last > state.next_arrival ||
        state.next_arrival > most || state.search_budget < -most || state.search_budget > most)
        throw std::invalid_argument("the state has numbers that no pool can have");
}

void check_bins(std::span<const int64_t> offsets, int64_t num_indices) {
    if (offsets.empty() || offsets.front() != 0 || offsets.back() != num_indices ||
        !std::is_sorted(offsets.begin(), offsets.end()))
        throw std::invalid_argument("offsets must rise from 0 to the number of indices");
}

void check_window(int64_t num_rows, int64_t block, int64_t start, int64_t count) {
    if (num_rows < 0 || num_rows > kMaxRows || block < 1 || start < 0 || start % block != 0 ||
        count > num_rows - start || count > UINT32_MAX)
        throw std::invalid_argument("window outside the rows, or not at a multiple of the block");
}

}  // namespace multipack
