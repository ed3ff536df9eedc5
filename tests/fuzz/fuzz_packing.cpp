// Packers, pools, permutations and bins: right and wrong numbers.
#include <iterator>
#include <numeric>
#include <set>
#include <vector>

#include "bounds.h"
#include "checks.h"
#include "integer_set.h"
#include "packing.h"
#include "permute.h"
#include "search.h"
#include "stream.h"
#include "targets.h"

using namespace multipack;

namespace {

void check_packed(int64_t num_bins, const std::vector<int32_t>& lengths, int64_t capacity, int64_t limit,
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

}  // namespace

void fuzz_pack(Bytes& bytes) {
    const int64_t most = bytes.once_in(50) ? 600000 : bytes.once_in(8) ? 5000 : 200;
    const int32_t capacity = static_cast<int32_t>(bytes.between(1, most));
    const int64_t limit = bytes.once_in(2) ? kNoLimit : bytes.between(1, 6);
    const int64_t longest = bytes.between(1, capacity);
    std::vector<int32_t> lengths(bytes.between(0, 90));
    for (int32_t& length : lengths) length = static_cast<int32_t>(bytes.between(1, longest));
    if (bytes.once_in(3) && !lengths.empty())
        lengths[bytes.between(0, static_cast<int64_t>(lengths.size()) - 1)] =
            static_cast<int32_t>(bytes.anything());
    const uint64_t seed = bytes.number();
    const auto run = [&](auto packer) {
        std::vector<int64_t> offsets(lengths.size() + 1);
        std::vector<int32_t> indices(lengths.size());
        const int64_t num_bins = packer(offsets, indices);
        check_packed(num_bins, lengths, capacity, limit, offsets, indices);
        shuffle_bins(0, num_bins, seed, offsets, indices);
        check_packed(num_bins, lengths, capacity, limit, offsets, indices);
        return num_bins;
    };
    std::vector<int64_t> counts(capacity + 1);
    check_packing(lengths, capacity, limit, std::vector<int64_t>(lengths.size() + 1),
                  std::vector<int32_t>(lengths.size()));
    histogram(lengths, counts);
    const int64_t bound = lower_bound(counts, capacity, limit);
    const int32_t pool_size = static_cast<int32_t>(bytes.between(1, 100));
    const int64_t bins[] = {
        run([&](auto& offsets, auto& indices) {
            return next_fit(lengths, capacity, limit, offsets, indices);
        }),
        run([&](auto& offsets, auto& indices) {
            return best_fit_decreasing(lengths, capacity, limit, seed, offsets, indices);
        }),
        run([&](auto& offsets, auto& indices) {
            return stream(lengths, capacity, limit, seed, pool_size, 0.0, offsets, indices);
        }),
        run([&](auto& offsets, auto& indices) {
            return pack_auto(lengths, capacity, limit, seed, offsets, indices);
        }),
    };
    for (int64_t num_bins : bins) check(num_bins >= bound, "fewer bins than the bound");
    if (bytes.once_in(16)) {  // milliseconds, where the others take microseconds
        const int64_t fewest = run([&](auto& offsets, auto& indices) {
            return pack_fewest(lengths, capacity, limit, seed, offsets, indices);
        });
        check(bound <= fewest && fewest <= bins[3], "bins of a search for fewer");
    }
    check(bins[1] == best_fit_decreasing_bins(counts, capacity, limit), "bins of a histogram");
}

/// Histograms and windows of any numbers at all.
void fuzz_numbers(Bytes& bytes) {
    const int64_t limit = bytes.once_in(2) ? kNoLimit : bytes.anything();
    if (bytes.once_in(2)) {
        std::vector<int64_t> counts(bytes.between(0, 40));
        for (int64_t& count : counts) count = bytes.once_in(8) ? bytes.anything() : bytes.between(0, 99);
        const int32_t capacity = bytes.once_in(8) ? static_cast<int32_t>(bytes.anything())
                                                  : static_cast<int32_t>(counts.size()) - 1;
        check_counts(counts, capacity, limit);
        const int64_t bins = best_fit_decreasing_bins(counts, capacity, limit);
        check(bins >= lower_bound(counts, capacity, limit), "fewer bins than the bound of a histogram");
    } else {
        const int64_t num_rows = bytes.anything(), block = bytes.anything(), start = bytes.anything();
        std::vector<int64_t> rows(bytes.between(0, 40));
        check_window(num_rows, block, start, static_cast<int64_t>(rows.size()));
        permuted_rows(num_rows, block, bytes.number(), start, rows);
        for (int64_t row : rows) check(row >= 0 && row < num_rows, "a row outside the permutation");
    }
}

/// Ends of bins of any numbers.
void fuzz_bins(Bytes& bytes) {
    std::vector<int32_t> indices(bytes.between(0, 20));
    std::iota(indices.begin(), indices.end(), 0);
    const int64_t count = static_cast<int64_t>(indices.size());
    std::vector<int64_t> offsets(bytes.between(0, 6));
    for (int64_t& end : offsets) end = bytes.once_in(8) ? bytes.anything() : bytes.between(0, count);
    if (!bytes.once_in(4)) std::sort(offsets.begin(), offsets.end());
    if (!offsets.empty() && !bytes.once_in(8)) offsets.front() = 0;
    if (!offsets.empty() && !bytes.once_in(8)) offsets.back() = count;
    check_bins(offsets, count);
    shuffle_bins(0, static_cast<int64_t>(offsets.size()) - 1, bytes.number(), offsets, indices);
    check_bins(offsets, count);
    std::sort(indices.begin(), indices.end());
    check(std::adjacent_find(indices.begin(), indices.end()) == indices.end(), "a shuffled row twice");
}

void fuzz_integer_set(Bytes& bytes) {
    const int64_t levels[] = {63, 64, 4095, 4096, 262143, 262144};
    const int32_t largest = static_cast<int32_t>(levels[bytes.between(0, 5)]);
    IntegerSet set(largest);
    std::set<int32_t> plain;
    for (int64_t step = bytes.between(0, 120); step > 0; --step) {
        const int32_t i = static_cast<int32_t>(bytes.between(0, bytes.once_in(2) ? 70 : largest));
        const int32_t at = std::min(i, largest);
        if (bytes.once_in(2)) {
            const int32_t end = std::min(at + static_cast<int32_t>(bytes.between(1, 150)), largest + 1);
            if (bytes.once_in(4)) {
                set.insert_range(at, end);
                for (int32_t member = at; member < end; ++member) plain.insert(member);
            } else {
                set.insert(at);
                plain.insert(at);
            }
        } else if (bytes.once_in(9)) {
            set.erase_if(at, false);  // also where there is no member
        } else if (const int32_t member = set.successor(at); member >= 0) {
            set.erase(member);
            plain.erase(member);
        }
        const auto from = plain.lower_bound(at), after = plain.upper_bound(at);
        check(set.successor(at) == (from == plain.end() ? -1 : *from), "the next length of a set");
        check(set.predecessor(at) == (after == plain.begin() ? -1 : *std::prev(after)),
              "the last length of a set");
        const auto in_word = plain.lower_bound(at >> 6 << 6);
        check(set.next_word(at >> 6) == (in_word == plain.end() ? -1 : *in_word >> 6),
              "the next word of a set");
        check((set.word(at >> 6) >> (at & 63) & 1) == plain.count(at), "a length of a set");
        const int32_t word = set.find_word(at >> 6, (largest >> 6) + 1, [](int32_t) { return true; });
        check(word == set.next_word(at >> 6), "the found word of a set");
    }
    std::vector<int32_t> visited;
    set.visit([&](int32_t member) {
        visited.push_back(member);
        return true;
    });
    check(std::ranges::equal(visited, plain), "members of a set in order");
    set.clear();
    check(set.successor(0) < 0, "a cleared set");
}

/// A pool that goes on from any numbers.
void fuzz_state(Bytes& bytes) {
    const int32_t capacity =
        static_cast<int32_t>(bytes.once_in(9) ? bytes.anything() : bytes.between(1, 300));
    const int32_t pool_size =
        static_cast<int32_t>(bytes.once_in(9) ? bytes.anything() : bytes.between(1, 40));
    check_pool(std::min(capacity, 5000), std::min(pool_size, 5000), 9);
    StreamPool pool(std::min(capacity, 5000), std::min(pool_size, 5000), 9, bytes.number());
    StreamPool::State state{};
    const int64_t size = bytes.between(0, std::min(pool_size, 40)), corrupt = bytes.once_in(2) ? 9 : 1000;
    int64_t arrival = bytes.between(0, 9);
    for (int64_t i = 0; i < size; ++i) {
        arrival = bytes.once_in(corrupt) ? bytes.anything() : arrival + bytes.between(0, 9);
        state.ids.push_back(i);
        state.arrivals.push_back(arrival);
        state.lengths.push_back(static_cast<int32_t>(
            bytes.once_in(corrupt) ? bytes.anything() : bytes.between(1, pool.capacity())));
    }
    if (bytes.once_in(corrupt) && size > 0) state.arrivals.pop_back();
    state.next_arrival = bytes.once_in(corrupt) ? bytes.anything() : arrival;
    state.search_budget = bytes.once_in(4) ? bytes.anything() : bytes.between(-99, 16384);
    state.random = bytes.number();
    check_state(pool, state);
    pool.restore(state);
    int64_t taken = 0, pushed = 0;  // bytes that are used up ask for a push each time
    while (pool.size() > 0) {
        const int32_t shortest = 1;
        if (bytes.once_in(3) && !pool.full() && pushed < 100) pool.push(-1, {&shortest, 1}), ++pushed;
        const auto lead = bytes.once_in(2) ? StreamPool::Lead::kLongest : StreamPool::Lead::kOldest;
        taken += static_cast<int64_t>(pool.fill(lead).ids.size());
    }
    check(taken == size + pushed, "sequences of a restored pool");
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
            const int32_t length = static_cast<int32_t>(lengths.back());
            pool.push(static_cast<int64_t>(lengths.size()) - 1, {&length, 1});
        } else if (pool.size() > 0) {
            StreamPool twin(capacity, pool_size, limit, 0);
            twin.restore(pool.state());
            const auto lead = bytes.once_in(2) ? StreamPool::Lead::kLongest : StreamPool::Lead::kOldest;
            const auto [used, ids] = pool.fill(lead);
            check(std::ranges::equal(ids, twin.fill(lead).ids), "a restored pool fills the same bin");
            int64_t sum = 0;
            for (int64_t id : ids) sum += lengths[id];
            check(!ids.empty() && sum == used && used <= capacity, "tokens of a bin of the pool");
            check(static_cast<int64_t>(ids.size()) <= limit, "sequences of a bin of the pool");
            seen.insert(seen.end(), ids.begin(), ids.end());
        }
    }
    std::sort(seen.begin(), seen.end());
    check(std::adjacent_find(seen.begin(), seen.end()) == seen.end(), "a sequence twice");
    check(static_cast<int64_t>(seen.size() + pool.size()) == static_cast<int64_t>(lengths.size()),
          "a sequence lost");
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
