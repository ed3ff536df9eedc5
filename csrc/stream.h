// Stream packing (shuffle-preserving exact fill): nearly full bins in nearly the given order.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "integer_set.h"
#include "random.h"

namespace multipack {

/// A pool of waiting sequences, from which bins are filled.
///
/// A bin is led by the oldest sequence and filled in order of arrival until the rest is below the pool's mean
/// length; then the rest is closed exactly by one, two or three sequences of the pool, found in a bitmap of
/// the lengths present. Where no exact fill exists, the nearest single or pair is taken.
///
/// Sequences lie in `slots_` in order of arrival; those that were taken leave holes, which are closed when
/// the slots run out. Whether a sequence is the last of its length, or a large one, is a toss of a coin, so
/// what is done in either case is written without branches.
///
/// Invariant: waiting_, the queues of equal lengths, present_ and mirrored_ describe the same sequences, and
/// score_of_large_ is their sum; between bins size_ and tokens_ are, too.
class StreamPool {
  public:
    StreamPool(int32_t capacity, int32_t pool_size, int64_t max_sequences, uint64_t seed);

    int32_t capacity() const { return capacity_; }
    int32_t size() const { return size_; }
    int32_t pool_size() const { return pool_size_; }
    bool full() const { return size_ == pool_size_; }

    /// Add sequences with ids from `first_id` on, for which the pool must have room.
    void push(int64_t first_id, std::span<const int32_t> lengths);

    enum class Lead { kOldest, kLongest };

    struct Bin {
        int32_t tokens;
        std::span<const int64_t> ids;  // until the next bin is filled
    };

    /// Take one bin out of the pool, which must not be empty. Led by the oldest sequence a bin keeps the
    /// order of arrival; led by the longest it wastes least when no more will arrive.
    Bin fill(Lead lead);

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
    int64_t score_of_large(int32_t length) const;
    void enqueue(int32_t slot, int32_t length);
    void close_holes();
    void take(int32_t length);
    bool present(int32_t length) const { return head(length) >= 0; }
    int32_t head(int32_t length) const { return newer_same_[home(length)]; }
    size_t home(int32_t length) const { return ids_.size() + length; }
    bool has_at_least(int32_t length, int times) const;
    void hide_if(int32_t length, bool really);
    int32_t exact_pair(int32_t target, int32_t first_word, int32_t hidden = 0);
    int32_t exact_pair_in(int32_t target, int32_t from, int32_t to, int32_t hidden) const;
    int32_t close(int32_t rest);
    bool close_with_triple(int32_t rest);
    int32_t nearest_pair(int32_t rest, int32_t single, int32_t* total);
    int32_t fill_in_order(int32_t rest, int64_t room);
    int32_t fill_longest_first(int32_t rest, int64_t room);
    int32_t oldest_large();
    bool large_need_all_small() const { return score_of_large_ > 3 * tokens_; }

    int32_t capacity_, pool_size_, half_;
    int64_t four_bins_;
    int64_t max_sequences_;
    std::vector<int64_t> ids_, arrived_at_;  // of each slot
    std::vector<int32_t> lengths_;           // of each slot
    int32_t end_ = 0;                        // slots used so far, with their holes
    IntegerSet waiting_;                     // slots that are no holes
    std::vector<uint64_t> large_;  // whether slots before large_end_ are, or were, longer than half_
    int32_t large_end_ = 0;
    int32_t first_large_word_ = 0;  // words before it have no bit in both large_ and waiting_
    // Queues of equal lengths. The oldest slot of a length is at home(length), its next at that slot, -1
    // behind the last; tails_[length] is the place of that -1.
    std::vector<int32_t> newer_same_, tails_;
    IntegerSet present_;              // lengths that are waiting
    std::vector<uint64_t> mirrored_;  // bit capacity - l for each length l that is waiting
    std::vector<int64_t> taken_;      // ids of the bin that is being filled
    int64_t num_taken_ = 0;
    int32_t size_ = 0;
    int64_t arrivals_ = 0, tokens_ = 0;
    int64_t score_of_large_ = 0;  // sum of 4 capacity - length over those longer than half the capacity
    int64_t search_budget_ = 0;
    Random random_;
};

/// Largest pool, in sequences, each of which takes up to 60 bytes.
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
