#include "stream.h"

#include <algorithm>
#include <bit>
#include <numeric>

namespace multipack {

namespace {

constexpr int kOrderLookahead = 32;        // sequences skipped at most while filling in order of arrival
constexpr int kTripleCandidates = 24;      // first members tried for an exact triple
constexpr int kTripleLookahead = 256;      // sequences passed over at most to find them
constexpr int32_t kNearestPairSlack = 64;  // tokens below the rest in which a nearest pair is sought
constexpr int64_t kMaxAgeInPools = 6;      // arrivals after which a waiting sequence leads the next bin
// Bitmap words that the searches may read, a bin and saved up: keeps uniform lengths as fast as the others.
constexpr int64_t kWordsPerBin = 16;
constexpr int64_t kMaxSavedWords = 16384;

/// Slots of a pool: the more, the seldomer the holes are closed; a large pool closes them after as many
/// sequences as it holds.
int32_t num_slots(int32_t pool_size) {
    constexpr int64_t kMostHoles = 1 << 16;
    const int64_t holes = std::max<int64_t>(pool_size, std::min(7 * int64_t{pool_size}, kMostHoles));
    return static_cast<int32_t>(pool_size + holes);
}

}  // namespace

StreamPool::StreamPool(int32_t capacity, int32_t pool_size, int64_t max_sequences, uint64_t seed)
    : capacity_(capacity),
      pool_size_(pool_size),
      half_(capacity / 2),
      four_bins_(4 * int64_t{capacity}),
      max_sequences_(max_sequences),
      ids_(num_slots(pool_size)),
      arrived_at_(ids_.size()),
      lengths_(ids_.size()),
      waiting_(static_cast<int32_t>(ids_.size())),
      large_((ids_.size() >> 6) + 1),
      newer_same_(ids_.size() + capacity + 1, -1),
      tails_(capacity + 1),
      present_(capacity),
      mirrored_((capacity >> 6) + 3),
      taken_(pool_size),
      random_(seed) {
    std::iota(tails_.begin(), tails_.end(), static_cast<int32_t>(home(0)));
}

inline int64_t StreamPool::score_of_large(int32_t length) const {
    return -int64_t{length > half_} & (four_bins_ - length);
}

void StreamPool::push(int64_t first_id, std::span<const int32_t> lengths) {
    const int32_t count = static_cast<int32_t>(lengths.size());
    if (end_ + count > static_cast<int32_t>(ids_.size())) close_holes();
    int64_t tokens = 0, score = 0;
    for (int32_t i = 0; i < count; ++i) {
        const int32_t slot = end_ + i, length = lengths[i];
        ids_[slot] = first_id + i;
        arrived_at_[slot] = arrivals_ + i;
        lengths_[slot] = length;
        enqueue(slot, length);
        tokens += length;
        score += score_of_large(length);
    }
    tokens_ += tokens;
    score_of_large_ += score;
    waiting_.insert_range(end_, end_ + count);
    end_ += count;
    size_ += count;
    arrivals_ += count;
}

/// Put a slot at the end of the queue of its length.
inline void StreamPool::enqueue(int32_t slot, int32_t length) {
    const int32_t mirror = capacity_ - length;
    newer_same_[slot] = -1;
    newer_same_[tails_[length]] = slot;
    tails_[length] = slot;
    present_.insert(length);
    mirrored_[mirror >> 6] |= 1ULL << (mirror & 63);
}

/// Move the waiting sequences to the first slots.
void StreamPool::close_holes() {
    int32_t next = 0;
    waiting_.visit([&](int32_t slot) {
        const int32_t length = lengths_[slot];
        newer_same_[home(length)] = -1;
        tails_[length] = static_cast<int32_t>(home(length));
        ids_[next] = ids_[slot];
        arrived_at_[next] = arrived_at_[slot];
        lengths_[next++] = length;
        return true;
    });
    waiting_.clear();
    std::fill(large_.begin(), large_.end(), 0);
    large_end_ = first_large_word_ = 0;
    for (int32_t slot = 0; slot < next; ++slot) enqueue(slot, lengths_[slot]);
    waiting_.insert_range(0, next);
    end_ = next;
}

/// Take the oldest sequence of a length that is present into the bin; fill() counts it.
inline void StreamPool::take(int32_t length) {
    int32_t& oldest = newer_same_[home(length)];
    const int32_t slot = oldest, mirror = capacity_ - length;
    oldest = newer_same_[slot];
    const bool last = oldest < 0;
    tails_[length] ^= -int32_t{last} & (tails_[length] ^ static_cast<int32_t>(home(length)));
    present_.erase_if(length, last);
    mirrored_[mirror >> 6] &= ~(uint64_t{last} << (mirror & 63));
    waiting_.erase(slot);
    taken_[num_taken_++] = ids_[slot];
    score_of_large_ -= score_of_large(length);
}

bool StreamPool::has_at_least(int32_t length, int times) const {
    int32_t slot = head(length);
    while (slot >= 0 && --times > 0) slot = newer_same_[slot];
    return slot >= 0;
}

/// Hide a length from exact_pair or, called again, show it.
void StreamPool::hide_if(int32_t length, bool really) {
    const int32_t mirror = capacity_ - length;
    present_.flip(length >> 6, uint64_t{really} << (length & 63));
    mirrored_[mirror >> 6] ^= uint64_t{really} << (mirror & 63);
}

/// The smaller of two lengths present that add up to `target`, or -1. The search starts at word `first_word`
/// of the bitmap and wraps around; words without a length cost budget as well, although they are passed over.
/// One sequence of length `hidden`, if not 0, does not count.
int32_t StreamPool::exact_pair(int32_t target, int32_t first_word, int32_t hidden) {
    const int32_t num_words = (target >> 7) + 1;
    int32_t first = exact_pair_in(target, first_word, num_words, hidden);
    if (first < 0 && first_word > 0) first = exact_pair_in(target, 0, first_word, hidden);
    const int32_t word = first >> 6;
    search_budget_ -= first < 0 ? num_words : word - first_word + (word < first_word ? num_words : 0) + 1;
    return first;
}

/// The same in words `from` up to `to`: bit a of `present` and of the mirrored map shifted by capacity -
/// target, 64 candidates a step.
int32_t StreamPool::exact_pair_in(int32_t target, int32_t from, int32_t to, int32_t hidden) const {
    const int32_t middle = target >> 1, last = middle & 63;
    const int32_t shift = capacity_ - target, shift_bits = shift & 63;
    const uint64_t* partners = mirrored_.data() + (shift >> 6);
    uint64_t match = 0;
    const int32_t word = present_.find_word(from, to, [&](int32_t w) {
        // The second shift in two steps, since 64 places at once are not defined.
        match = present_.word(w) & (partners[w] >> shift_bits | partners[w + 1] << 1 << (63 - shift_bits));
        if (match == 0 || w != middle >> 6) return match != 0;
        if (last < 63) match &= (2ULL << last) - 1;
        const int least = middle == hidden ? 3 : 2;
        if (!(target & 1) && match >> last != 0 && !has_at_least(middle, least)) match ^= 1ULL << last;
        return match != 0;
    });
    return word < 0 ? -1 : (word << 6) + std::countr_zero(match);
}

/// Close `rest` exactly with one of the oldest sequences and a single or pair beside it.
bool StreamPool::close_with_triple(int32_t rest) {
    int tried = 0, seen = 0;
    bool closed = false;
    waiting_.visit([&](int32_t slot) {
        if (tried == kTripleCandidates || ++seen > kTripleLookahead || --search_budget_ <= 0) return false;
        const int32_t first = lengths_[slot];
        if (first >= rest) return true;
        ++tried;
        const int32_t others = rest - first;
        // The candidate must not be its own partner.
        const bool single = present(others) && (others != first || has_at_least(first, 2));
        int32_t second = others;
        if (!single) {
            const bool alone = !has_at_least(first, 2);
            hide_if(first, alone);
            second = exact_pair(others, 0, first);
            hide_if(first, alone);
        }
        if (second < 0) return true;
        take(first);
        take(second);
        if (!single) take(others - second);
        closed = true;
        return false;
    });
    return closed;
}

/// The largest pair that fits and beats `single`; -1 if none is near.
int32_t StreamPool::nearest_pair(int32_t rest, int32_t single, int32_t* total) {
    const int32_t floor = std::max(single, rest - kNearestPairSlack);
    for (*total = rest - 1; *total > floor && search_budget_ > 0; --*total) {
        const int32_t first = exact_pair(*total, 0);
        if (first > 0) return first;
    }
    return -1;
}

/// The oldest slot longer than half a bin; there must be one.
int32_t StreamPool::oldest_large() {
    for (; large_end_ < end_; ++large_end_)
        large_[large_end_ >> 6] |= uint64_t{lengths_[large_end_] > half_} << (large_end_ & 63);
    int32_t& word = first_large_word_;
    while ((large_[word] & waiting_.word(word)) == 0) ++word;
    return (word << 6) + std::countr_zero(large_[word] & waiting_.word(word));
}

/// Take sequences in order of arrival while the rest stays above the mean length; returns the new rest.
int32_t StreamPool::fill_in_order(int32_t rest, int64_t room) {
    const int32_t reserve = static_cast<int32_t>((tokens_ + size_ - 1) / size_);  // the mean, rounded up
    int skipped = 0;
    waiting_.visit([&](int32_t slot) {
        const int32_t length = lengths_[slot];
        if (length <= rest && (num_taken_ == 0 || rest - length >= reserve || rest == length)) {
            take(length);  // perhaps one before `slot`: equal lengths leave in order of arrival
            rest -= length;
            return rest >= reserve && num_taken_ < room;
        }
        return ++skipped < kOrderLookahead && rest >= 2 * reserve;
    });
    return rest;
}

/// Take the longest that fit while the rest stays above twice the mean length; returns the new rest.
int32_t StreamPool::fill_longest_first(int32_t rest, int64_t room) {
    const int64_t reserve = 2 * tokens_ / size_;
    while (num_taken_ < room && (num_taken_ == 0 || rest > reserve)) {
        const int32_t length = present_.predecessor(rest);
        if (length <= 0) break;
        take(length);
        rest -= length;
    }
    return rest;
}

StreamPool::Bin StreamPool::fill(Lead lead) {
    search_budget_ = std::min(search_budget_ + kWordsPerBin, kMaxSavedWords);
    num_taken_ = 0;
    int32_t rest = capacity_;
    // Three places are kept for the closing, so that a limit on sequences does not leave bins open.
    const int64_t room_in_order = std::max<int64_t>(1, max_sequences_ - 3);
    const auto overdue = [&] {
        return arrivals_ - arrived_at_[waiting_.successor(0)] > kMaxAgeInPools * pool_size_;
    };
    if (lead == Lead::kLongest) {
        rest = fill_longest_first(rest, room_in_order);
    } else if (large_need_all_small() && !overdue()) {
        const int32_t length = lengths_[oldest_large()];
        take(length);
        rest -= length;
    } else {
        rest = fill_in_order(rest, room_in_order);
    }
    const int32_t tokens = capacity_ - close(rest);
    size_ -= static_cast<int32_t>(num_taken_);
    tokens_ -= tokens;
    return {tokens, std::span(taken_).first(num_taken_)};
}

/// Fill the rest exactly, or as far as can be; returns what is left of it.
int32_t StreamPool::close(int32_t rest) {
    while (rest > 0 && num_taken_ < max_sequences_) {
        const int64_t room = max_sequences_ - num_taken_;
        if (present(rest)) {
            take(rest);
            return 0;
        }
        const int32_t single = present_.predecessor(rest);
        if (single <= 0) break;
        if (room >= 2) {
            const int32_t num_words = (rest >> 7) + 1;
            const int32_t first = exact_pair(rest, static_cast<int32_t>(random_.below(num_words)));
            if (first > 0) {
                take(rest - first);
                take(first);
                return 0;
            }
            if (room >= 3 && close_with_triple(rest)) return 0;
            int32_t total = 0;
            const int32_t near = nearest_pair(rest, single, &total);
            if (near > 0) {
                take(total - near);
                take(near);
                rest -= total;
                continue;
            }
        }
        take(single);
        rest -= single;
    }
    return rest;
}

StreamPool::State StreamPool::state() const {
    State state{{}, {}, {}, arrivals_, search_budget_, random_.state()};
    waiting_.visit([&](int32_t slot) {
        state.ids.push_back(ids_[slot]);
        state.arrivals.push_back(arrived_at_[slot]);
        state.lengths.push_back(lengths_[slot]);
        return true;
    });
    return state;
}

void StreamPool::restore(const State& state) {
    for (size_t i = 0; i < state.ids.size(); ++i) {
        arrivals_ = state.arrivals[i];
        push(state.ids[i], {&state.lengths[i], 1});
    }
    arrivals_ = state.next_arrival;
    search_budget_ = state.search_budget;
    random_.set_state(state.random);
}

int32_t stream_pool_size(int64_t num_sequences, int64_t num_tokens, int32_t capacity) {
    if (num_sequences == 0) return 1;
    const double per_bin = static_cast<double>(capacity) * num_sequences / static_cast<double>(num_tokens);
    const int64_t wanted =
        std::min<int64_t>(kMaxPoolSize, std::max<int64_t>(1024, static_cast<int64_t>(8 * per_bin)));
    // A pool with less than a bin's worth would close bins half empty while more sequences wait outside.
    const int64_t least = std::min({num_sequences, static_cast<int64_t>(2 * per_bin) + 1, wanted});
    return static_cast<int32_t>(std::clamp(num_sequences / 8, least, wanted));
}

void shuffle_bins(int64_t first, int64_t num_bins, uint64_t seed, std::span<int64_t> offsets,
                  std::span<int32_t> indices) {
    std::vector<int64_t> order(num_bins - first);
    std::iota(order.begin(), order.end(), first);
    Random random(seed);
    shuffle(std::span(order), random);
    const std::vector<int64_t> ends(offsets.begin() + first, offsets.begin() + num_bins + 1);
    const std::vector<int32_t> rows(indices.begin() + ends.front(), indices.begin() + ends.back());
    int64_t written = ends.front();
    for (size_t b = 0; b < order.size(); ++b) {
        const int64_t from = ends[order[b] - first], to = ends[order[b] - first + 1];
        std::copy(rows.begin() + (from - ends.front()), rows.begin() + (to - ends.front()),
                  indices.begin() + written);
        written += to - from;
        offsets[first + b + 1] = written;
    }
}

int64_t stream(std::span<const int32_t> lengths, int32_t capacity, int64_t max_sequences, uint64_t seed,
               int32_t pool_size, double min_fill, std::span<int64_t> offsets, std::span<int32_t> indices) {
    constexpr int64_t kWindow = 256;  // bins over which the fill is watched
    const int64_t min_tokens = static_cast<int64_t>(min_fill * kWindow * capacity);
    const int64_t count = static_cast<int64_t>(lengths.size());
    StreamPool pool(capacity, pool_size, max_sequences, seed);
    int64_t next = 0, written = 0, bins = 0, tokens = 0;
    auto fill = [&](StreamPool::Lead lead) {
        const StreamPool::Bin bin = pool.fill(lead);
        tokens += bin.tokens;
        for (int64_t id : bin.ids) indices[written++] = static_cast<int32_t>(id);
        offsets[++bins] = written;
    };
    offsets[0] = 0;
    while (true) {
        const int64_t arriving = std::min<int64_t>(pool_size - pool.size(), count - next);
        pool.push(next, lengths.subspan(next, arriving));
        next += arriving;
        if (next == count) break;
        fill(StreamPool::Lead::kOldest);
        if (bins % kWindow == 0) {
            if (tokens < min_tokens) return -1;
            tokens = 0;
        }
    }
    const int64_t last = bins;
    while (pool.size() > 0) fill(StreamPool::Lead::kLongest);
    shuffle_bins(last, bins, seed, offsets, indices);
    return bins;
}

}  // namespace multipack
