#include "bounds.h"

#include <algorithm>
#include <vector>

namespace multipack {

namespace {

int64_t ceil_divide(int64_t a, int64_t b) { return a / b + (a % b != 0); }

/// Sequences and tokens by range of lengths.
class Sums {
  public:
    explicit Sums(std::span<const int64_t> counts) : count_(counts.size() + 1), tokens_(counts.size() + 1) {
        for (size_t l = 1; l < counts.size(); ++l) {
            count_[l + 1] = count_[l] + counts[l];
            tokens_[l + 1] = tokens_[l] + counts[l] * static_cast<int64_t>(l);
        }
    }

    /// Of lengths from..to-1.
    int64_t count(int64_t from, int64_t to) const { return from < to ? count_[to] - count_[from] : 0; }
    int64_t tokens(int64_t from, int64_t to) const { return from < to ? tokens_[to] - tokens_[from] : 0; }

  private:
    std::vector<int64_t> count_, tokens_;
};

/// Carlier, Clautiaux and Moukrim: with n = capacity / unit, a length l below half the capacity weighs
/// 2 (l / unit), half of it n, and above it 2 n - 2 ((capacity - l) / unit); a bin holds 2 n.
int64_t counting_bound(const Sums& sums, int64_t capacity, int64_t unit) {
    const int64_t fit = capacity / unit, above = capacity / 2 + 1;  // the shortest above half
    int64_t weight = 2 * fit * sums.count(above, capacity + 1);
    if (capacity % 2 == 0) weight += fit * sums.count(capacity / 2, above);
    for (int64_t multiple = unit; 2 * multiple < capacity; multiple += unit) {
        weight += 2 * sums.count(multiple, (capacity + 1) / 2);
        weight -= 2 * sums.count(above, capacity - multiple + 1);
    }
    return ceil_divide(weight, 2 * fit);
}

/// Burdett and Johnson: with r = capacity % unit, a length l weighs (l / unit) (unit - r) +
/// max(0, l % unit - r), and a bin holds what the capacity weighs.
int64_t rounding_bound(const Sums& sums, int64_t capacity, int64_t unit) {
    const int64_t rest = capacity % unit;
    int64_t weight = 0;
    for (int64_t multiple = 0; multiple <= capacity; multiple += unit) {
        const int64_t next = std::min(multiple + unit, capacity + 1);
        if (multiple > 0) weight += (unit - rest) * sums.count(multiple, capacity + 1);
        const int64_t from = multiple + rest;
        weight += sums.tokens(from, next) - from * sums.count(from, next);
    }
    return ceil_divide(weight, capacity / unit * (unit - rest));
}

}  // namespace

int64_t quick_lower_bound(std::span<const int64_t> counts, int32_t capacity, int64_t max_sequences) {
    const int32_t half = capacity / 2;
    int64_t count = 0, tokens = 0, large = 0, large_gap = 0;  // large: longer than half a bin
    for (int32_t l = 1; l <= capacity; ++l) {
        count += counts[l];
        tokens += counts[l] * l;
        if (l > half) {
            large += counts[l];
            large_gap += counts[l] * (capacity - l);
        }
    }
    int64_t bound = std::max(ceil_divide(tokens, capacity), ceil_divide(count, max_sequences));
    // L2: sequences shorter than `shortest` are ignored; those longer than capacity - shortest stand alone,
    // so their gaps are worth nothing; the small ones must go into the gaps of the others or into bins of
    // their own.
    int64_t small_tokens = 0, gap = large_gap;
    for (int32_t l = 1; l <= half; ++l) small_tokens += counts[l] * l;
    for (int32_t shortest = 1; shortest <= half; ++shortest) {
        gap -= counts[capacity - shortest + 1] * (shortest - 1);
        bound = std::max(bound, large + (small_tokens > gap ? ceil_divide(small_tokens - gap, capacity) : 0));
        small_tokens -= counts[shortest] * shortest;
    }
    return std::max(bound, large);
}

int64_t lower_bound(std::span<const int64_t> counts, int32_t capacity, int64_t max_sequences) {
    constexpr int32_t kMostUnits = 1 << 16;
    const Sums sums(counts);
    int64_t bound = quick_lower_bound(counts, capacity, max_sequences);
    const int32_t step = std::max(1, capacity / 2 / kMostUnits);
    // Weights are at most 4 / unit times the tokens: units from 4 on cannot overflow.
    const bool few_tokens = sums.tokens(0, capacity + 1) < INT64_MAX / 4;
    for (int32_t unit = capacity / 2; unit > 0; unit -= step) {
        if (unit >= 4 || few_tokens) bound = std::max(bound, counting_bound(sums, capacity, unit));
        bound = std::max(bound, rounding_bound(sums, capacity, unit));
    }
    return bound;
}

}  // namespace multipack
