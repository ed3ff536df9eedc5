// A set of whole numbers that finds a member's neighbours in a few steps, however sparse it is.
#pragma once

#include <bit>
#include <cstdint>
#include <vector>

namespace multipack {

/// A bitmap below a tree of summaries: bit w of a level says whether word w of the level below holds any bit.
/// A plain bitmap of 2^24 lengths would be read for its empty words alone.
class LengthSet {
  public:
    explicit LengthSet(int32_t largest) {
        size_t size = static_cast<size_t>(largest) + 1;
        do {
            size = (size + 63) / 64;
            levels_.emplace_back(size);
        } while (size > 1 || levels_.size() < 2);
    }

    void insert(int32_t i) {
        for (auto& level : levels_) {
            uint64_t& word = level[i >> 6];
            const bool known_above = word != 0;
            word |= 1ULL << (i & 63);
            if (known_above) return;
            i >>= 6;
        }
    }

    void erase(int32_t i) {
        for (auto& level : levels_) {
            if (level[i >> 6] &= ~(1ULL << (i & 63))) return;
            i >>= 6;
        }
    }

    /// The smallest member from `i` on, or -1.
    int32_t successor(int32_t i) const { return successor_in(0, i); }

    /// The largest member up to `i`, or -1.
    int32_t predecessor(int32_t i) const {
        for (size_t up = 0; up < levels_.size() && i >= 0; ++up) {
            const uint64_t bits = levels_[up][i >> 6] << (63 - (i & 63));
            if (bits) {
                i -= std::countl_zero(bits);
                while (up-- > 0) i = (i << 6) + 63 - std::countl_zero(levels_[up][i]);
                return i;
            }
            i = (i >> 6) - 1;
        }
        return -1;
    }

    /// Members 64 w .. 64 w + 63 as bits.
    uint64_t word(int32_t w) const { return levels_[0][w]; }

    /// The first word from `w` on that holds a member, or -1.
    int32_t next_word(int32_t w) const { return successor_in(1, w); }

  private:
    int32_t successor_in(size_t level, int32_t i) const {
        for (size_t up = level; up < levels_.size(); ++up) {
            if (static_cast<size_t>(i >> 6) >= levels_[up].size()) return -1;
            const uint64_t bits = levels_[up][i >> 6] >> (i & 63);
            if (bits) {
                i += std::countr_zero(bits);
                while (up-- > level) i = (i << 6) + std::countr_zero(levels_[up][i]);
                return i;
            }
            i = (i >> 6) + 1;
        }
        return -1;
    }

    std::vector<std::vector<uint64_t>> levels_;
};

}  // namespace multipack
