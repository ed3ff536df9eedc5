// Search for a packing with fewer bins: a plain function over spans, no Python.
#pragma once

#include <cstdint>
#include <span>

namespace multipack {

/// pack_auto, and for up to 4096 sequences in more bins than the lower bound a search for fewer.
///
/// The search (consistent neighbourhood search, Buljubasic and Vasquez 2016, over a sample of the bins) takes
/// the emptiest bin apart and swaps up to two of its sequences for up to two of another bin, each time those
/// that leave the fewest tokens outside; what left a bin stays outside for some swaps. It ends at the bound
/// or after a fixed number of steps, which take a few milliseconds, so that the answer is the same
/// everywhere.
int64_t pack_fewest(std::span<const int32_t> lengths, int32_t capacity, int64_t max_sequences, uint64_t seed,
                    std::span<int64_t> offsets, std::span<int32_t> indices);

}  // namespace multipack
