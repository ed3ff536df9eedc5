// Stream packing (shuffle-preserving exact fill): nearly full bins in nearly the given order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "length_set.h"
#include "random.h"

namespace multipack {

/// A pool of waiting sequences, from which bins are filled.
///
/// A bin is led by the oldest sequence and filled in order of arrival until the rest is below the pool's mean
/// length; then the rest is closed exactly by one, two or three sequences of the pool, found in a bitmap of
/// the lengths present. Where no exact fill exists, the nearest single or pair is taken.
///
/// Invariant: presence bitmaps, counts per length, token sums and the age list describe the same set of
/// slots.
class StreamPool {
  public:
    StreamPool(int32_t capacity, int32_t pool_size, int64_t max_sequences, uint64_t seed);

    int32_t capacity() const { return capacity_; }
    int32_t size() const { return size_; }
    int32_t pool_size() const { return pool_size_; }
    bool full() const { return size_ == pool_size_; }

    /// Add a sequence; the pool must not be full.
    void push(int64_t id, int32_t length);

    enum class Lead { kOldest, kLongest };

    /// Take one bin out of the pool, which must not be empty. Appends ids to `ids` and returns the tokens
    /// taken. Led by the oldest sequence a bin keeps the order of arrival; led by the longest it wastes least
    /// when no more will arrive.
    int32_t fill(Lead lead, std::vector<int64_t>& ids);

    /// All that the next bins depend on besides the arguments of the constructor.
    struct State {
        std::vector<int64_t> ids, arrivals;  // in order of arrival
        std::vector<int32_t> lengths;
        int64_t next_arrival, search_budget;
        uint64_t random;
    };
    State state() const;

    /// Go on from a state; the pool must be new.
    void restore(const State& state);

  private:
    struct Slot {
        int64_t id;
        int64_t arrival;
        int32_t length;
        int32_t older, newer;              // neighbours in order of arrival
        int32_t older_large, newer_large;  // the same among sequences longer than half the capacity
        int32_t newer_same;                // next of the same length
    };
    struct Bucket {
        int32_t count = 0, head = -1, tail = -1;
    };

    void take(int32_t slot, std::vector<int64_t>& ids);
    void take_length(int32_t length, std::vector<int64_t>& ids) { take(buckets_[length].head, ids); }
    bool present(int32_t length) const { return buckets_[length].count > 0; }
    void mark(int32_t length);
    void unmark(int32_t length);
    int32_t exact_pair(int32_t target, int32_t first_word);
    int32_t exact_pair_in(int32_t target, int32_t from, int32_t to) const;
    bool close_with_triple(int32_t rest, std::vector<int64_t>& ids);
    int32_t nearest_pair(int32_t rest, int32_t single, int32_t* total);
    int32_t fill_in_order(int32_t rest, int64_t room, std::vector<int64_t>& ids, int64_t* taken);
    int32_t fill_longest_first(int32_t rest, int64_t room, std::vector<int64_t>& ids, int64_t* taken);
    bool large_need_all_small() const;

    int32_t capacity_, pool_size_, half_;
    int64_t max_sequences_;
    LengthSet present_;
    std::vector<uint64_t> mirrored_;  // bit capacity - l for each length l that is present
    std::vector<Bucket> buckets_;
    std::vector<Slot> slots_;
    std::vector<int32_t> free_;
    int32_t size_ = 0;
    int64_t arrivals_ = 0, tokens_ = 0;
    int64_t large_gap_ = 0, small_tokens_ = 0;
    int64_t search_budget_ = 0;
    Random random_;
};

/// Largest pool, in sequences: a slot takes 40 bytes.
constexpr int32_t kMaxPoolSize = 1 << 24;

/// Pool size that keeps bins full: eight bins' worth of sequences and at least 1024, but an eighth of them at
/// most, so that most bins keep the order of arrival; never below two bins' worth.
int32_t stream_pool_size(int64_t num_sequences, int64_t num_tokens, int32_t capacity);

/// Pack a whole array through a pool. When the last sequence has arrived, bins are led by the longest that is
/// left, and these last bins are shuffled. Returns the number of bins, or -1 as soon as the share of filled
/// slots in 256 bins in a row is below `min_fill` (0: never give up).
int64_t stream(std::span<const int32_t> lengths, int32_t capacity, int64_t max_sequences, uint64_t seed,
               int32_t pool_size, double min_fill, std::span<int64_t> offsets, std::span<int32_t> indices);

/// Put bins [first, num_bins) into a random order.
void shuffle_bins(int64_t first, int64_t num_bins, uint64_t seed, std::span<int64_t> offsets,
                  std::span<int32_t> indices);

}  // namespace multipack
