#include "packing.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "bounds.h"
#include "integer_set.h"
#include "random.h"
#include "stream.h"

namespace multipack {

namespace {

/// Bins that hold the same lengths: `copies` of `length` on top of what `parent` holds.
struct Group {
    int32_t parent, length, copies, next;
    int64_t sequences;  // in one bin
    int64_t count;      // bins still open with this content
};

/// Best-fit decreasing over groups; returns the number of bins and leaves the final groups in `groups`.
int64_t best_fit_groups(std::span<const int64_t> counts, int32_t capacity, int64_t max_sequences,
                        std::vector<Group>& groups) {
    IntegerSet remainders(capacity);
    std::vector<int32_t> head(capacity + 1, -1);
    int64_t bins = 0;
    for (int32_t length = capacity; length > 0; --length) {
        int64_t left = counts[length];
        while (left > 0) {
            const int32_t tightest = remainders.successor(length);
            const int32_t parent = tightest < 0 ? -1 : head[tightest];
            const int32_t rest = parent < 0 ? capacity : tightest;
            const int64_t held = parent < 0 ? 0 : groups[parent].sequences;
            // Every bin of the group takes as many copies as fit; a last bin takes what is left.
            const int64_t copies = std::min({left, int64_t{rest / length}, max_sequences - held});
            int64_t taken = left / copies;
            if (parent < 0) {
                bins += taken;
            } else {
                taken = std::min(taken, groups[parent].count);
                groups[parent].count -= taken;
                if (groups[parent].count == 0) {
                    head[rest] = groups[parent].next;
                    if (head[rest] < 0) remainders.erase(rest);
                }
            }
            left -= copies * taken;
            const int32_t rest_after = rest - static_cast<int32_t>(copies) * length;
            groups.push_back({parent, length, static_cast<int32_t>(copies), -1, held + copies, taken});
            if (rest_after > 0 && held + copies < max_sequences) {
                groups.back().next = head[rest_after];
                head[rest_after] = static_cast<int32_t>(groups.size()) - 1;
                remainders.insert(rest_after);
            }
        }
    }
    return bins;
}

/// Row ids grouped by length (a counting sort), shuffled inside each length.
std::vector<int32_t> rows_by_length(std::span<const int32_t> lengths, std::span<const int64_t> starts,
                                    uint64_t seed) {
    std::vector<int32_t> rows(lengths.size());
    std::vector<int64_t> next(starts.begin(), starts.end());
    for (size_t row = 0; row < lengths.size(); ++row) rows[next[lengths[row]]++] = static_cast<int32_t>(row);
    Random random(seed);
    for (size_t length = 0; length + 1 < starts.size(); ++length) {
        const int64_t size = starts[length + 1] - starts[length];
        if (size > 1) shuffle(std::span(rows).subspan(starts[length], size), random);
    }
    return rows;
}

/// Write the bins of the groups: parents first, so that a bin's lengths fall.
void emit_groups(const std::vector<Group>& groups, std::span<const int32_t> rows, std::vector<int64_t> next,
                 std::span<int64_t> offsets, std::span<int32_t> indices) {
    int64_t written = 0, bin = 0;
    offsets[0] = 0;
    std::vector<const Group*> content;
    for (const Group& group : groups) {
        if (group.count == 0) continue;
        content.clear();
        for (const Group* part = &group;; part = &groups[part->parent]) {
            content.push_back(part);
            if (part->parent < 0) break;
        }
        for (int64_t repeat = 0; repeat < group.count; ++repeat) {
            for (auto part = content.rbegin(); part != content.rend(); ++part) {
                int64_t& from = next[(*part)->length];
                std::copy_n(rows.begin() + from, (*part)->copies, indices.begin() + written);
                from += (*part)->copies;
                written += (*part)->copies;
            }
            offsets[++bin] = written;
        }
    }
}

}  // namespace

void histogram(std::span<const int32_t> lengths, std::span<int64_t> counts) {
    // Four tables, since equal neighbours would otherwise wait for each other's store.
    std::fill(counts.begin(), counts.end(), 0);
    const size_t size = counts.size();
    const size_t whole = lengths.size() / 4 * 4;
    if (whole < size) {
        for (int32_t length : lengths) ++counts[length];
        return;
    }
    std::vector<int32_t> tables(3 * size);
    for (size_t i = 0; i < whole; i += 4) {
        ++counts[lengths[i]];
        ++tables[lengths[i + 1]];
        ++tables[size + lengths[i + 2]];
        ++tables[2 * size + lengths[i + 3]];
    }
    for (size_t i = whole; i < lengths.size(); ++i) ++counts[lengths[i]];
    for (size_t l = 0; l < size; ++l)
        counts[l] += int64_t{tables[l]} + tables[size + l] + tables[2 * size + l];
}

int64_t next_fit(std::span<const int32_t> lengths, int32_t capacity, int64_t max_sequences,
                 std::span<int64_t> offsets, std::span<int32_t> indices) {
    int64_t bins = 0, start = 0, used = 0;
    offsets[0] = 0;
    std::iota(indices.begin(), indices.end(), 0);
    const int64_t count = static_cast<int64_t>(lengths.size());
    for (int64_t row = 0; row < count; ++row) {
        if (used + lengths[row] > capacity || row - start == max_sequences) {
            offsets[++bins] = start = row;
            used = 0;
        }
        used += lengths[row];
    }
    if (count > 0) offsets[++bins] = count;
    return bins;
}

int64_t best_fit_decreasing_bins(std::span<const int64_t> counts, int32_t capacity, int64_t max_sequences) {
    std::vector<Group> groups;
    return best_fit_groups(counts, capacity, max_sequences, groups);
}

int64_t best_fit_decreasing(std::span<const int32_t> lengths, int32_t capacity, int64_t max_sequences,
                            uint64_t seed, std::span<int64_t> offsets, std::span<int32_t> indices) {
    std::vector<int64_t> counts(capacity + 1);
    histogram(lengths, counts);
    std::vector<Group> groups;
    const int64_t bins = best_fit_groups(counts, capacity, max_sequences, groups);
    std::vector<int64_t> starts(capacity + 2, 0);
    std::partial_sum(counts.begin(), counts.end(), starts.begin() + 1);
    emit_groups(groups, rows_by_length(lengths, starts, seed), starts, offsets, indices);
    return bins;
}

int64_t pack_auto(std::span<const int32_t> lengths, int32_t capacity, int64_t max_sequences, uint64_t seed,
                  std::span<int64_t> offsets, std::span<int32_t> indices) {
    constexpr double kClearlyFewer = 0.0005;  // share of bins that a less random order must save
    constexpr double kGiveUp =
        0.002;  // fill below that of best-fit decreasing at which the stream ends early
    constexpr int64_t kSearchAll = 8192;          // sequences up to which a pool may hold all
    constexpr int64_t kSequencesOfTries = 32768;  // bound on the work of further tries, in sequences
    const int64_t count = static_cast<int64_t>(lengths.size());
    std::vector<int64_t> counts(capacity + 1);
    histogram(lengths, counts);
    int64_t tokens = 0;
    for (int32_t l = 1; l <= capacity; ++l) tokens += counts[l] * l;
    const int64_t bound = quick_lower_bound(counts, capacity, max_sequences);
    const int64_t sorted_bins = best_fit_decreasing_bins(counts, capacity, max_sequences);
    const double sorted_fill =
        static_cast<double>(tokens) / (static_cast<double>(std::max<int64_t>(sorted_bins, 1)) * capacity);
    auto clearly_fewer = [&](int64_t bins, int64_t than) {
        return bins < than - static_cast<int64_t>(kClearlyFewer * bins);
    };

    const int32_t pool_size = stream_pool_size(count, tokens, capacity);
    int64_t bins =
        stream(lengths, capacity, max_sequences, seed, pool_size, sorted_fill - kGiveUp, offsets, indices);
    if (bins < 0) bins = INT64_MAX / 2;
    if (bins <= bound) return bins;
    // A small input may be searched from its longest sequence down, and again with other ties.
    std::vector<int64_t> other_offsets;
    std::vector<int32_t> other_indices;
    const int64_t num_tries =
        count <= kSearchAll ? std::min<int64_t>(8, kSequencesOfTries / std::max<int64_t>(count, 1)) : 0;
    for (int64_t attempt = 1; attempt <= num_tries && bins > bound; ++attempt) {
        other_offsets.resize(count + 1);
        other_indices.resize(count);
        const int32_t pool =
            static_cast<int32_t>(attempt % 2 == 1 ? count : std::max<int64_t>(pool_size, count / 4));
        const int64_t found =
            stream(lengths, capacity, max_sequences, seed + attempt, pool, 0.0, other_offsets, other_indices);
        if (!clearly_fewer(found, bins)) continue;
        bins = found;
        std::copy_n(other_offsets.begin(), bins + 1, offsets.begin());
        std::copy(other_indices.begin(), other_indices.end(), indices.begin());
    }
    if (clearly_fewer(sorted_bins, bins)) {
        bins = best_fit_decreasing(lengths, capacity, max_sequences, seed, offsets, indices);
        shuffle_bins(0, bins, seed, offsets, indices);
    }
    return bins;
}

}  // namespace multipack
