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

}  // namespace

StreamPool::StreamPool(int32_t capacity, int32_t pool_size, int64_t max_sequences, uint64_t seed)
    : capacity_(capacity),
      pool_size_(pool_size),
      half_(capacity / 2),
      max_sequences_(max_sequences),
      present_(capacity),
      mirrored_((capacity >> 6) + 3),
      buckets_(capacity + 1),
      slots_(pool_size + 1),
      free_(pool_size),
      random_(seed) {
    // The last slot is the sentinel that closes both age lists into rings.
    Slot& end = slots_[pool_size];
    end.older = end.newer = end.older_large = end.newer_large = pool_size;
    for (int32_t i = 0; i < pool_size; ++i) free_[i] = pool_size - 1 - i;
}

void StreamPool::mark(int32_t length) {
    const int32_t mirror = capacity_ - length;
    present_.insert(length);
    mirrored_[mirror >> 6] |= 1ULL << (mirror & 63);
}

void StreamPool::unmark(int32_t length) {
    const int32_t mirror = capacity_ - length;
    present_.erase(length);
    mirrored_[mirror >> 6] &= ~(1ULL << (mirror & 63));
}

void StreamPool::push(int64_t id, int32_t length) {
    const int32_t end = pool_size_;
    const int32_t slot = free_[pool_size_ - ++size_];
    Slot& s = slots_[slot];
    s.id = id;
    s.arrival = arrivals_++;
    s.length = length;
    s.older = slots_[end].older;
    s.newer = end;
    slots_[s.older].newer = slot;
    slots_[end].older = slot;
    s.newer_same = -1;
    Bucket& bucket = buckets_[length];
    if (bucket.count++ == 0) {
        bucket.head = slot;
        mark(length);
    } else {
        slots_[bucket.tail].newer_same = slot;
    }
    bucket.tail = slot;
    if (length > half_) {
        s.older_large = slots_[end].older_large;
        s.newer_large = end;
        slots_[s.older_large].newer_large = slot;
        slots_[end].older_large = slot;
        large_gap_ += capacity_ - length;
    } else {
        small_tokens_ += length;
    }
    tokens_ += length;
}

/// Remove a slot, which is always the oldest of its length.
void StreamPool::take(int32_t slot, std::vector<int64_t>& ids) {
    Slot& s = slots_[slot];
    slots_[s.older].newer = s.newer;
    slots_[s.newer].older = s.older;
    Bucket& bucket = buckets_[s.length];
    bucket.head = s.newer_same;
    if (--bucket.count == 0) unmark(s.length);
    if (s.length > half_) {
        slots_[s.older_large].newer_large = s.newer_large;
        slots_[s.newer_large].older_large = s.older_large;
        large_gap_ -= capacity_ - s.length;
    } else {
        small_tokens_ -= s.length;
    }
    tokens_ -= s.length;
    ids.push_back(s.id);
    free_[pool_size_ - size_--] = slot;
}

/// The smaller of two lengths present that add up to `target`, or -1. The search starts at word `first_word`
/// of the bitmap and wraps around; words without a length cost budget as well, although they are passed over.
int32_t StreamPool::exact_pair(int32_t target, int32_t first_word) {
    const int32_t num_words = (target >> 7) + 1;
    int32_t first = exact_pair_in(target, first_word, num_words);
    if (first < 0) first = exact_pair_in(target, 0, first_word);
    const int32_t word = first >> 6;
    search_budget_ -= first < 0 ? num_words : word - first_word + (word < first_word ? num_words : 0) + 1;
    return first;
}

/// The same in words `from` up to `to`: bit a of `present` and of the mirrored map shifted by capacity -
/// target, 64 candidates a step.
int32_t StreamPool::exact_pair_in(int32_t target, int32_t from, int32_t to) const {
    const int32_t middle = target >> 1;
    const int32_t shift = capacity_ - target, shift_words = shift >> 6, shift_bits = shift & 63;
    for (int32_t word = present_.next_word(from); 0 <= word && word < to;
         word = present_.next_word(word + 1)) {
        uint64_t partner = mirrored_[word + shift_words] >> shift_bits;
        if (shift_bits) partner |= mirrored_[word + shift_words + 1] << (64 - shift_bits);
        uint64_t match = present_.word(word) & partner;
        if (word == middle >> 6) {
            const int32_t last = middle & 63;
            if (last < 63) match &= (2ULL << last) - 1;
            if (!(target & 1) && buckets_[middle].count < 2) match &= ~(1ULL << last);
        }
        if (match) return (word << 6) + std::countr_zero(match);
    }
    return -1;
}

/// Close `rest` exactly with one of the oldest sequences and a single or pair beside it.
bool StreamPool::close_with_triple(int32_t rest, std::vector<int64_t>& ids) {
    int tried = 0, seen = 0;
    for (int32_t slot = slots_[pool_size_].newer; slot != pool_size_; slot = slots_[slot].newer) {
        if (tried == kTripleCandidates || ++seen > kTripleLookahead || --search_budget_ <= 0) return false;
        const int32_t first = slots_[slot].length;
        if (first >= rest) continue;
        ++tried;
        const int32_t others = rest - first;
        // The candidate must not be its own partner, so it leaves the maps during the search.
        Bucket& bucket = buckets_[first];
        if (--bucket.count == 0) unmark(first);
        const bool single = present(others);
        const int32_t second = single ? others : exact_pair(others, 0);
        if (bucket.count++ == 0) mark(first);
        if (second < 0) continue;
        take_length(first, ids);
        take_length(second, ids);
        if (!single) take_length(others - second, ids);
        return true;
    }
    return false;
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

/// True when the sequences longer than half a bin leave gaps for nearly all shorter ones: then every short
/// one is needed as a filler and bins are led by long ones.
bool StreamPool::large_need_all_small() const { return 4 * large_gap_ > 3 * small_tokens_; }

/// Take sequences in order of arrival while the rest stays above the mean length; returns the new rest.
int32_t StreamPool::fill_in_order(int32_t rest, int64_t room, std::vector<int64_t>& ids, int64_t* taken) {
    const int32_t reserve = static_cast<int32_t>((tokens_ + size_ - 1) / size_);  // the mean, rounded up
    int skipped = 0;
    int32_t slot = slots_[pool_size_].newer;
    while (slot != pool_size_ && *taken < room && skipped < kOrderLookahead) {
        const int32_t length = slots_[slot].length;
        int32_t next = slots_[slot].newer;
        if (length <= rest && (*taken == 0 || rest - length >= reserve || rest == length)) {
            const int32_t oldest = buckets_[length].head;  // equal lengths leave in order of arrival
            if (next == oldest) next = slots_[oldest].newer;
            take(oldest, ids);
            ++*taken;
            rest -= length;
            if (rest < reserve) break;
        } else {
            ++skipped;
            if (rest < 2 * reserve) break;
        }
        slot = next;
    }
    return rest;
}

/// Take the longest that fit while the rest stays above twice the mean length; returns the new rest.
int32_t StreamPool::fill_longest_first(int32_t rest, int64_t room, std::vector<int64_t>& ids,
                                       int64_t* taken) {
    const int64_t reserve = 2 * tokens_ / size_;
    while (size_ > 0 && *taken < room && (*taken == 0 || rest > reserve)) {
        const int32_t length = present_.predecessor(rest);
        if (length <= 0) break;
        take_length(length, ids);
        ++*taken;
        rest -= length;
    }
    return rest;
}

int32_t StreamPool::fill(Lead lead, std::vector<int64_t>& ids) {
    search_budget_ = std::min(search_budget_ + kWordsPerBin, kMaxSavedWords);
    int32_t rest = capacity_;
    int64_t taken = 0;
    // Three places are kept for the closing, so that a limit on sequences does not leave bins open.
    const int64_t room_in_order = std::max<int64_t>(1, max_sequences_ - 3);
    const Slot& oldest = slots_[slots_[pool_size_].newer];
    const bool overdue = arrivals_ - oldest.arrival > kMaxAgeInPools * pool_size_;
    const int32_t oldest_large = slots_[pool_size_].newer_large;
    if (lead == Lead::kLongest) {
        rest = fill_longest_first(rest, room_in_order, ids, &taken);
    } else if (!overdue && oldest_large != pool_size_ && large_need_all_small()) {
        const int32_t length = slots_[oldest_large].length;
        take_length(length, ids);
        rest -= length;
        taken = 1;
    } else {
        rest = fill_in_order(rest, room_in_order, ids, &taken);
    }
    while (rest > 0 && taken < max_sequences_) {
        const int64_t room = max_sequences_ - taken;
        if (present(rest)) {
            take_length(rest, ids);
            return capacity_;
        }
        const int32_t single = present_.predecessor(rest);
        if (single <= 0) break;
        if (room >= 2) {
            const int32_t num_words = (rest >> 7) + 1;
            const int32_t first = exact_pair(rest, static_cast<int32_t>(random_.below(num_words)));
            if (first > 0) {
                take_length(rest - first, ids);
                take_length(first, ids);
                return capacity_;
            }
            if (room >= 3 && close_with_triple(rest, ids)) return capacity_;
            int32_t total = 0;
            const int32_t near = nearest_pair(rest, single, &total);
            if (near > 0) {
                take_length(total - near, ids);
                take_length(near, ids);
                rest -= total;
                taken += 2;
                continue;
            }
        }
        take_length(single, ids);
        rest -= single;
        ++taken;
    }
    return capacity_ - rest;
}

StreamPool::State StreamPool::state() const {
    State state{{}, {}, {}, arrivals_, search_budget_, random_.state()};
    for (int32_t slot = slots_[pool_size_].newer; slot != pool_size_; slot = slots_[slot].newer) {
        state.ids.push_back(slots_[slot].id);
        state.arrivals.push_back(slots_[slot].arrival);
        state.lengths.push_back(slots_[slot].length);
    }
    return state;
}

void StreamPool::restore(const State& state) {
    for (size_t i = 0; i < state.ids.size(); ++i) {
        arrivals_ = state.arrivals[i];
        push(state.ids[i], state.lengths[i]);
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
    std::vector<int64_t> ids;
    int64_t next = 0, written = 0, bins = 0, tokens = 0;
    auto fill = [&](StreamPool::Lead lead) {
        ids.clear();
        tokens += pool.fill(lead, ids);
        for (int64_t id : ids) indices[written++] = static_cast<int32_t>(id);
        offsets[++bins] = written;
    };
    offsets[0] = 0;
    while (true) {
        while (next < count && !pool.full()) {
            pool.push(next, lengths[next]);
            ++next;
        }
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
