// Fewest bins that any packing of some lengths could use: plain functions over histograms, no Python.
//
// `counts[l]` is the number of sequences of length l, counts.size() = capacity + 1, and all of them together
// have less than 2^63 tokens.
#pragma once

#include <cstdint>
#include <span>

namespace multipack {

/// The larger of ceil(sum / capacity), ceil(count / max_sequences) and the bound L2 of Martello and Toth
/// (1990). One pass over the histogram.
int64_t quick_lower_bound(std::span<const int64_t> counts, int32_t capacity, int64_t max_sequences);

/// The largest of that and of two families of dual feasible functions (survey: Clautiaux, Alves and Valerio
/// de Carvalho 2010): those of Carlier, Clautiaux and Moukrim (2007), which count how many sequences fit a
/// bin, and those of Burdett and Johnson (1977), which round to multiples; each for every parameter up to
/// half the capacity, or for 2^16 of them. O(capacity log capacity).
int64_t lower_bound(std::span<const int64_t> counts, int32_t capacity, int64_t max_sequences);

}  // namespace multipack
