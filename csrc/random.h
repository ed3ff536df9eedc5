// Small seeded generators: the same numbers on every platform, no global state.
#pragma once

#include <cstdint>
#include <span>
#include <utility>

namespace multipack {

/// SplitMix64 finaliser (Steele, Lea, Flood 2014): a bijection that scrambles all 64 bits.
inline uint64_t mix64(uint64_t x) {
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9ULL;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebULL;
    return x ^ (x >> 31);
}

/// SplitMix64 stream.
class Random {
  public:
    explicit Random(uint64_t seed) : state_(mix64(seed + 0x9e3779b97f4a7c15ULL)) {}

    uint64_t next() { return mix64(state_ += 0x9e3779b97f4a7c15ULL); }

    /// A number in [0, bound), 1 <= bound < 2^32. The bias is below bound / 2^32 (Lemire 2019 without
    /// rejection).
    uint64_t below(uint64_t bound) { return ((next() >> 32) * bound) >> 32; }

    uint64_t state() const { return state_; }
    void set_state(uint64_t state) { state_ = state; }

  private:
    uint64_t state_;
};

/// Fisher-Yates shuffle in place.
template <class T>
void shuffle(std::span<T> items, Random& random) {
    for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random.below(i)]);
}

/// A permutation of [0, size) that needs no memory: four Feistel rounds with cycle walking
/// (Black and Rogaway 2002). Any position is reached in O(1).
class FeistelPermutation {
  public:
    FeistelPermutation(uint64_t size, uint64_t seed) : size_(size) {
        int bits = 2;
        while (bits < 62 && (1ULL << bits) < size) ++bits;
        low_bits_ = (bits + 1) / 2;
        high_bits_ = bits - low_bits_;
        for (int round = 0; round < 4; ++round)
            keys_[round] = mix64(seed + mix64(static_cast<uint64_t>(round) + 1));
    }

    uint64_t operator()(uint64_t position) const {
        // Unbalanced halves keep the domain below 2 * size, so less than two walks are needed on average.
        uint64_t x = position;
        do {
            int left_bits = high_bits_, right_bits = low_bits_;
            uint64_t left = x >> right_bits, right = x & ((1ULL << right_bits) - 1);
            for (uint64_t key : keys_) {
                const uint64_t mixed = left ^ (scramble(right + key) & ((1ULL << left_bits) - 1));
                left = right;
                right = mixed;
                std::swap(left_bits, right_bits);
            }
            x = (left << right_bits) | right;
        } while (x >= size_);
        return x;
    }

  private:
    static uint64_t scramble(uint64_t x) {
        x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93ULL;
        return x ^ (x >> 32);
    }

    uint64_t size_;
    uint64_t keys_[4];
    int low_bits_, high_bits_;
};

}  // namespace multipack
