// The shuffled order of an epoch, window by window: plain functions over spans, no Python.
#pragma once

#include <cstdint>
#include <span>

namespace multipack {

/// Most rows: the permutation has 62 bits.
constexpr int64_t kMaxRows = int64_t{1} << 62;

/// Rows at positions [start, start + rows.size()) of a seeded permutation of [0, num_rows).
///
/// Blocks of `block` neighbours are permuted as a whole (block 1: single rows), so that a data set on a slow
/// disk is read in runs; then the rows of the window are shuffled among themselves. Every position is reached
/// in O(1), so any window can be had without the others; over all windows each row comes exactly once.
/// Windows must start at multiples of `block`.
void permuted_rows(int64_t num_rows, int64_t block, uint64_t seed, int64_t start, std::span<int64_t> rows);

}  // namespace multipack
