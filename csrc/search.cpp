#include "search.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "bounds.h"
#include "packing.h"
#include "random.h"

namespace multipack {

namespace {

constexpr int64_t kMostSequences = 4096;   // of a set that is searched
constexpr int64_t kMostSteps = 1 << 20;    // ways to leave a bin that are looked at, in all
constexpr size_t kSampledBins = 24;        // bins looked at for a swap
constexpr int64_t kPatience = 4;           // swaps until one is made that lets more tokens out than in
constexpr int32_t kSampledSequences = 16;  // of a bin or outside looked at for a swap

/// Up to two sequences, by their places in a list; -1 for none.
struct Some {
    int32_t tokens = 0, first = -1, second = -1;
    int32_t size() const { return (first >= 0) + (second >= 0); }
};

struct Swap {
    int64_t gain = std::numeric_limits<int64_t>::min();  // tokens that go in - tokens that come out
    size_t bin = 0;
    Some out, in;
};

class Search {
  public:
    Search(std::span<const int32_t> lengths, int32_t capacity, int64_t max_sequences, uint64_t seed)
        : lengths_(lengths),
          capacity_(capacity),
          max_sequences_(max_sequences),
          stays_out_until_(lengths.size()),
          random_(seed) {}

    using Bin = std::vector<int32_t>;

    /// Take bins away from `bins` until there are `bound`, or until the steps are used up.
    void shrink(std::vector<Bin>& bins, int64_t bound) {
        while (static_cast<int64_t>(bins.size()) > bound && steps_ < kMostSteps) {
            bins_ = bins;
            loads_.clear();
            for (const Bin& bin : bins_) loads_.push_back(tokens(bin));
            const auto emptiest = std::min_element(loads_.begin(), loads_.end()) - loads_.begin();
            outside_ = bins_[emptiest];
            bins_.erase(bins_.begin() + emptiest);
            loads_.erase(loads_.begin() + emptiest);
            std::fill(stays_out_until_.begin(), stays_out_until_.end(), 0);
            while (!outside_.empty() && steps_ < kMostSteps) swap();
            if (!outside_.empty()) return;
            bins = bins_;
        }
    }

  private:
    int32_t tokens(const Bin& bin) const {
        int32_t sum = 0;
        for (int32_t row : bin) sum += lengths_[row];
        return sum;
    }

    /// One or two sequences of a list that may go elsewhere, by falling tokens. Of a long list a sample.
    std::vector<Some> candidates(Bin& from) {
        const int32_t size = static_cast<int32_t>(from.size()), count = std::min(size, kSampledSequences);
        for (int32_t i = 0; i < count; ++i) std::swap(from[i], from[i + random_.below(size - i)]);
        std::vector<Some> found;
        const auto free = [&](int32_t i) { return stays_out_until_[from[i]] <= num_swaps_; };
        for (int32_t i = 0; i < count; ++i) {
            if (!free(i)) continue;
            const int32_t one = lengths_[from[i]];
            found.push_back({one, i, -1});
            for (int32_t j = i + 1; j < count; ++j)
                if (free(j) && one + int64_t{lengths_[from[j]]} <= capacity_)
                    found.push_back({one + lengths_[from[j]], i, j});
        }
        std::sort(found.begin(), found.end(), [](const Some& a, const Some& b) {
            return a.tokens != b.tokens ? a.tokens > b.tokens
                                        : std::pair(a.first, a.second) < std::pair(b.first, b.second);
        });
        return found;
    }

    /// Try to take `out` from a bin: the most that fits then goes in.
    void try_out(size_t b, const Some& out, const std::vector<Some>& candidates, Swap& best) {
        ++steps_;
        const int32_t room = capacity_ - loads_[b] + out.tokens;
        const int64_t places = max_sequences_ - static_cast<int64_t>(bins_[b].size()) + out.size();
        auto in = std::partition_point(candidates.begin(), candidates.end(),
                                       [&](const Some& some) { return some.tokens > room; });
        // The same tokens would change nothing, and more sequences than there are places do not fit.
        while (in != candidates.end() &&
               (in->size() > places || (in->tokens == out.tokens && in->size() == out.size())))
            ++in;
        if (in == candidates.end() || in->tokens - out.tokens <= best.gain) return;
        best = {in->tokens - out.tokens, b, out, *in};
    }

    /// Look at the ways to take up to two sequences out of bin `b`; of a bin of many, some in a row.
    void try_bin(size_t b, const std::vector<Some>& in, Swap& best) {
        const Bin& bin = bins_[b];
        const int32_t size = static_cast<int32_t>(bin.size()), count = std::min(size, kSampledSequences);
        const int32_t start = count < size ? static_cast<int32_t>(random_.below(size)) : 0;
        try_out(b, {}, in, best);
        for (int32_t i = 0; i < count; ++i) {
            const int32_t one = (start + i) % size;
            try_out(b, {lengths_[bin[one]], one, -1}, in, best);
            for (int32_t j = i + 1; j < count; ++j) {
                const int32_t two = (start + j) % size;
                const int32_t tokens = lengths_[bin[one]] + lengths_[bin[two]];
                try_out(b, {tokens, std::min(one, two), std::max(one, two)}, in, best);
            }
        }
    }

    void swap() {
        ++num_swaps_;
        size_t donor = random_.below(bins_.size());  // the emptiest of a few
        for (int i = 0; i < 3; ++i)
            if (const size_t other = random_.below(bins_.size()); loads_[other] < loads_[donor])
                donor = other;
        empty_further(donor);
        fill_from_outside(donor);
    }

    /// Bring free slots together: give sequences to a fuller bin, perhaps against shorter ones.
    void empty_further(size_t donor) {
        if (bins_[donor].empty()) return;
        const std::vector<Some> in = candidates(bins_[donor]);
        Swap best;
        best.gain = 0;
        for (size_t sampled = 0; sampled < kSampledBins; ++sampled) {
            const size_t b = random_.below(bins_.size());
            if (b == donor || loads_[b] == capacity_) continue;
            // A gain above the difference leaves less free in the other bin than there was in either.
            Swap found;
            found.gain = std::max<int64_t>(best.gain, loads_[donor] - loads_[b]);
            try_bin(b, in, found);
            if (found.in.size() > 0) best = found;
        }
        const int64_t size = static_cast<int64_t>(bins_[donor].size()) - best.in.size() + best.out.size();
        if (best.in.size() > 0 && size <= max_sequences_) apply(best, bins_[donor], &loads_[donor]);
    }

    /// Swap with what is outside; now and then also where more comes out than goes in.
    void fill_from_outside(size_t likely) {
        const std::vector<Some> in = candidates(outside_);
        Swap best;
        try_bin(likely, in, best);
        for (size_t sampled = 0; sampled < kSampledBins; ++sampled)
            try_bin(random_.below(bins_.size()), in, best);
        if (best.in.size() == 0 || (best.gain <= 0 && num_swaps_ % kPatience != 0)) return;
        for (int32_t row : apply(best, outside_, nullptr))
            stays_out_until_[row] = num_swaps_ + 2 + static_cast<int64_t>(random_.below(8));
    }

    /// Returns what left the bin of the swap.
    Bin apply(const Swap& swap, Bin& from, int32_t* load) {
        Bin& bin = bins_[swap.bin];
        Bin leaving, entering;
        for (int32_t place : {swap.out.second, swap.out.first}) move(bin, place, leaving);
        for (int32_t place : {swap.in.second, swap.in.first}) move(from, place, entering);
        bin.insert(bin.end(), entering.begin(), entering.end());
        from.insert(from.end(), leaving.begin(), leaving.end());
        loads_[swap.bin] += swap.in.tokens - swap.out.tokens;
        if (load) *load -= swap.in.tokens - swap.out.tokens;
        return leaving;
    }

    /// Move the row at `place`, if it is one; later places first.
    static void move(Bin& from, int32_t place, Bin& to) {
        if (place < 0) return;
        to.push_back(from[place]);
        from.erase(from.begin() + place);
    }

    std::span<const int32_t> lengths_;
    int32_t capacity_;
    int64_t max_sequences_;
    std::vector<Bin> bins_;
    std::vector<int32_t> loads_;
    Bin outside_;
    std::vector<int64_t> stays_out_until_;  // swaps, of each row
    int64_t num_swaps_ = 0, steps_ = 0;
    Random random_;
};

}  // namespace

int64_t pack_fewest(std::span<const int32_t> lengths, int32_t capacity, int64_t max_sequences, uint64_t seed,
                    std::span<int64_t> offsets, std::span<int32_t> indices) {
    const int64_t num_bins = pack_auto(lengths, capacity, max_sequences, seed, offsets, indices);
    if (static_cast<int64_t>(lengths.size()) > kMostSequences) return num_bins;
    std::vector<int64_t> counts(capacity + 1);
    histogram(lengths, counts);
    const int64_t bound = lower_bound(counts, capacity, max_sequences);
    if (num_bins <= bound) return num_bins;
    std::vector<Search::Bin> bins;
    for (int64_t b = 0; b < num_bins; ++b)
        bins.emplace_back(indices.begin() + offsets[b], indices.begin() + offsets[b + 1]);
    Search(lengths, capacity, max_sequences, seed).shrink(bins, bound);
    int64_t written = 0;
    for (size_t b = 0; b < bins.size(); ++b) {
        std::copy(bins[b].begin(), bins[b].end(), indices.begin() + written);
        written += static_cast<int64_t>(bins[b].size());
        offsets[b + 1] = written;
    }
    return static_cast<int64_t>(bins.size());
}

}  // namespace multipack
