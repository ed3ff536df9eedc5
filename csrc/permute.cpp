#include "permute.h"

#include <algorithm>

#include "random.h"

namespace multipack {

void permuted_rows(int64_t num_rows, int64_t block, uint64_t seed, int64_t start, std::span<int64_t> rows) {
    // The last, shorter block keeps its place at the end: every window but the last then holds whole blocks.
    const int64_t num_whole = num_rows / block;
    const FeistelPermutation permutation(static_cast<uint64_t>(num_whole), seed);
    const int64_t stop = start + static_cast<int64_t>(rows.size());
    int64_t written = 0;
    for (int64_t position = start; position < stop;) {
        const int64_t place = position / block;
        const int64_t from = place < num_whole ? static_cast<int64_t>(permutation(place)) : num_whole;
        const int64_t length = std::min(block - position % block, stop - position);
        for (int64_t i = 0; i < length; ++i) rows[written++] = from * block + position % block + i;
        position += length;
    }
    Random random(mix64(seed) ^ static_cast<uint64_t>(start));
    shuffle(rows, random);
}

}  // namespace multipack
