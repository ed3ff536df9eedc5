// Pack sequence lengths into bins: plain functions over spans, no Python.
//
// Every packer takes lengths in 1..capacity, writes bin ends to `offsets` (offsets[0] = 0, room for one more
// than there are lengths) and row ids to `indices`, and returns the number of bins.
#pragma once

#include <cstdint>
#include <span>

namespace multipack {

constexpr int64_t kNoLimit = INT64_MAX;

/// Largest capacity in tokens: the packers keep tables of that many entries.
constexpr int32_t kMaxCapacity = 1 << 24;

/// Put each sequence into the open bin, or open a new one. Keeps the order.
int64_t next_fit(std::span<const int32_t> lengths, int32_t capacity, int64_t max_sequences,
                 std::span<int64_t> offsets, std::span<int32_t> indices);

/// Best-fit decreasing (Johnson 1973) over a histogram of lengths: bins with the same remainder and the same
/// content are one group, so the work grows with the number of groups, not of sequences.
/// Sequences of equal length are dealt in an order drawn from `seed`.
int64_t best_fit_decreasing(std::span<const int32_t> lengths, int32_t capacity, int64_t max_sequences,
                            uint64_t seed, std::span<int64_t> offsets, std::span<int32_t> indices);

/// Number of bins of best-fit decreasing for a histogram: counts[l] sequences of length l, counts.size() =
/// capacity + 1.
int64_t best_fit_decreasing_bins(std::span<const int64_t> counts, int32_t capacity, int64_t max_sequences);

/// counts[l] = number of sequences of length l; counts.size() = capacity + 1.
void histogram(std::span<const int32_t> lengths, std::span<int64_t> counts);

/// Stream packing, replaced by best-fit decreasing (bins in a random order) or by a search for exact fills
/// where these need clearly fewer bins. Small inputs get a few more tries. `pool_size` as in stream.h.
int64_t pack_auto(std::span<const int32_t> lengths, int32_t capacity, int64_t max_sequences, uint64_t seed,
                  std::span<int64_t> offsets, std::span<int32_t> indices);

}  // namespace multipack
