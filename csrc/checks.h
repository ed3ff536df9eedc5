// What packers and permutations ask of their arguments. They write without looking, so whoever calls them
// with arguments from outside looks here first; each function throws std::invalid_argument.
#pragma once

#include <cstdint>
#include <span>

#include "stream.h"

namespace multipack {

/// Lengths in 1..capacity, arrays that are long enough and share no memory.
void check_packing(std::span<const int32_t> lengths, int32_t capacity, int64_t max_sequences,
                   std::span<const int64_t> offsets, std::span<const int32_t> indices);

/// A histogram of lengths 0..capacity whose tokens 64 bits can count.
void check_counts(std::span<const int64_t> counts, int32_t capacity, int64_t max_sequences);

/// Limits within which a pool is possible.
void check_pool(int32_t capacity, int32_t pool_size, int64_t max_sequences);

/// A state that `pool`, which must be empty, can go on from.
void check_state(const StreamPool& pool, const StreamPool::State& state);

/// Bin ends that rise from 0 to the number of indices.
void check_bins(std::span<const int64_t> offsets, int64_t num_indices);

/// A window of `count` rows from `start`, a multiple of `block`, on.
void check_window(int64_t num_rows, int64_t block, int64_t start, int64_t count);

}  // namespace multipack
