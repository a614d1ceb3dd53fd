#include "draw.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <mutex>
#include <vector>

#include "guarded.h"
#include "pool.h"
#include "selection.h"
#include "simd.h"

namespace folio {
namespace {

static_assert(sizeof(Draw) == 5 * sizeof(double));  // as the Python binding has it

constexpr int64_t GROUP = 64;  // tokens whose largest logit and whose weight are known together
constexpr int64_t SPAN = 64;   // groups that a thread looks through at once, where threads share a row
constexpr int64_t FIRST_GROUPS = 64;  // whose tokens top-p looks at first
// Tokens less likely than e^LOWEST times the likeliest weigh nothing: all of a vocabulary's together would be lost in the
// rounding of a sum in double.
constexpr float LOWEST = -60.0f;

int64_t groups_of(int64_t width) { return (width + GROUP - 1) / GROUP; }

// Tops are looked at in whole vectors.
int64_t padded(int64_t count) { return (count + PANEL - 1) / PANEL * PANEL; }

// The largest of `count` values, a multiple of LANES. A value that is NaN or +inf makes `odd` NaN.
inline float top_of(const float* x, int64_t count, vf& odd) {
    vf top = vset(-INFINITY);
    for (int64_t i = 0; i < count; i += LANES) {
        vf value = vload(x + i);
        top = vmax(value, top);
        odd = vfma(vmax(vset(-FLT_MAX), value), vzero(), odd);  // vmax's second may be NaN
    }
    return vtop(top);
}

bool is_odd(vf odd) {
    float sum = vsum(odd);
    return sum != sum;
}

// Where a thread puts the values that a cut looks at.
struct Candidates {
    std::vector<float> values, weights;
};

// One row. Scores are (logit − the largest) / temperature: 0 and below. A cut is a floor under the scores, so that a token
// stays or goes by its own score, whatever the order of the others. Sums are made group by group, so that a token does
// not depend on the threads.
class Row {
public:
    Row(const float* logits, int64_t width, const Draw& draw, float* tops, double* ends)
        : x_(logits), width_(width), groups_(groups_of(width)), draw_(draw), tops_(tops), ends_(ends),
          temperature_(float(draw.temperature)) {}

    // The largest logit of groups from `begin` on; NaN, where a group has one.
    void find_tops(int64_t begin, int64_t end) {
        float tail[GROUP];
        vf odd = vzero();
        for (int64_t g = begin; g < end; g++) tops_[g] = top_of(group(g, tail), GROUP, odd);
        if (!is_odd(odd)) return;
        for (int64_t g = begin; g < end; g++) {
            const float* x = group(g, tail);
            for (int64_t i = 0; i < GROUP; i++)
                if (x[i] != x[i]) tops_[g] = NAN;
        }
    }

    // After all tops: the row's largest logit (NaN, if there is one), the least token that has it, and the floor that
    // min-p and top-k are.
    void begin(Candidates& candidates, float& best, int64_t& token) {
        std::fill(tops_ + groups_, tops_ + padded(groups_), -INFINITY);
        vf odd = vzero();
        top_ = top_of(tops_, padded(groups_), odd);
        if (is_odd(odd))
            for (int64_t g = 0; g < groups_; g++)
                if (tops_[g] != tops_[g]) top_ = NAN;
        best = top_;
        random_ = temperature_ > 0 && std::isfinite(temperature_) && std::isfinite(top_);
        if (!random_) {
            token = likeliest();
            return;
        }
        for (int64_t g = 0; g < padded(groups_); g += LANES) vstore(tops_ + g, scores(tops_ + g));
        floor_ = LOWEST;
        if (draw_.min_p > 0) floor_ = std::min(std::max(floor_, float(std::log(draw_.min_p))), 0.0f);
        if (draw_.top_k >= 1 && draw_.top_k < double(width_)) cut_top_k(candidates);
    }

    // The weights of groups from `begin` on, under the floor.
    void weigh(int64_t begin, int64_t end) {
        if (!random_) return;
        float tail[GROUP];
        vf floor = vset(floor_);
        for (int64_t g = begin; g < end; g++) {
            ends_[g] = 0;
            if (!(tops_[g] >= floor_)) continue;
            const float* x = group(g, tail);
            auto weight = [&](int64_t i) {
                vf score = scores(x + i * LANES);
                return vwhere_ge(score, floor, vexp(score));
            };
            WideSum sum;
            for (int64_t i = 0; i < GROUP / LANES; i += 2) sum.add(vadd(weight(i), weight(i + 1)));
            ends_[g] = sum.sum();
        }
    }

    // After all groups were weighed: cuts by top-p, and draws.
    void finish(Candidates& candidates, int64_t& token) {
        if (!random_) return;
        if (draw_.top_p < 1 && cut_top_p(candidates)) weigh(0, groups_);
        token = drawn();
    }

    void all(Candidates& candidates, float& best, int64_t& token) {
        find_tops(0, groups_);
        begin(candidates, best, token);
        weigh(0, groups_);
        finish(candidates, token);
    }

    int64_t groups() const { return groups_; }

private:
    // GROUP logits of a group; the last one's are filled up with −inf.
    const float* group(int64_t g, float* tail) const {
        int64_t from = g * GROUP, count = width_ - from;
        if (count >= GROUP) return x_ + from;
        std::copy(x_ + from, x_ + width_, tail);
        std::fill(tail + count, tail + GROUP, -INFINITY);
        return tail;
    }

    vf scores(const float* logits) const { return vdiv(vsub(vload(logits), vset(top_)), vset(temperature_)); }

    int64_t likeliest() const {
        auto is_top = [&](float value) { return value == top_ || (value != value && top_ != top_); };
        int64_t g = std::find_if(tops_, tops_ + groups_, is_top) - tops_;
        return std::find_if(x_ + g * GROUP, x_ + width_, is_top) - x_;
    }

    // Scores not below `least`, the vocabulary's first first; returns how many.
    int64_t collect(float least, std::vector<float>& into) const {
        float tail[GROUP];
        float* at = into.data();
        vf bound = vset(least);
        for (int64_t g = 0; g < groups_; g++) {
            if (!(tops_[g] >= least)) continue;
            const float* x = group(g, tail);
            for (int64_t i = 0; i < GROUP; i += LANES) at += vstore_ge(at, scores(x + i), bound);
        }
        return at - into.data();
    }

    // A score that at least k tokens have, where more than k groups hold tokens above the floor; else the floor.
    float bound_of(int64_t k, std::vector<float>& values) const {
        if (k >= groups_) return floor_;
        int64_t count = 0;
        for (int64_t g = 0; g < groups_; g++) {
            values[size_t(count)] = tops_[g];
            count += tops_[g] >= floor_;
        }
        return count > k ? reaching(values.data(), nullptr, count, double(k), floor_, 0.0f) : floor_;
    }

    // The floor becomes the score of the k-th likeliest token, unless it is higher already.
    void cut_top_k(Candidates& candidates) {
        int64_t k = int64_t(draw_.top_k);
        std::vector<float>& values = candidates.values;
        float least = bound_of(k, values);
        int64_t count = collect(least, values);
        floor_ = count > k ? reaching(values.data(), nullptr, count, double(k), least, 0.0f) : least;
    }

    // The weights of the first `count` candidates, and their sum.
    static double weigh(Candidates& candidates, int64_t count) {
        float *values = candidates.values.data(), *weights = candidates.weights.data();
        std::fill(values + count, values + padded(count), -INFINITY);
        WideSum sum;
        for (int64_t i = 0; i < count; i += LANES) {
            vf value = vload(values + i), weight = vwhere_ge(value, vset(LOWEST), vexp(value));
            vstore(weights + i, weight);
            sum.add(weight);
        }
        return sum.sum();
    }

    // The floor becomes the score of the last token that top-p needs; whether it is higher than it was.
    bool cut_top_p(Candidates& candidates) {
        double mass = 0;
        for (int64_t g = 0; g < groups_; g++) mass += ends_[g];
        double wanted = draw_.top_p * mass;
        float least = bound_of(FIRST_GROUPS, candidates.values);
        int64_t count = collect(least, candidates.values);
        double found = weigh(candidates, count);
        if (found < wanted && least > floor_) {
            // A vocabulary of tokens that each weigh less than this holds less than what may go; a little for rounding.
            least = std::max(floor_, float(std::log((mass - wanted) / double(width_)) - 0.01));
            count = collect(least, candidates.values);
            found = weigh(candidates, count);
        }
        if (found < wanted) return false;  // by rounding: so little may go that nothing does
        float floor = reaching(candidates.values.data(), candidates.weights.data(), count, wanted, least, 0.0f);
        std::swap(floor, floor_);
        return floor_ > floor;
    }

    // The token in which `uniform` of all weights falls. The groups' weights become where they end.
    int64_t drawn() {
        double total = 0;
        for (int64_t g = 0; g < groups_; g++) ends_[g] = total += ends_[g];
        // Rounding must not carry a draw to the very end, where the tokens may all be cut.
        double target = draw_.uniform > 0 ? std::min(draw_.uniform * total, std::nextafter(total, 0.0)) : 0.0;
        int64_t g = std::upper_bound(ends_, ends_ + groups_, target) - ends_;
        float tail[GROUP], weights[GROUP];
        const float* x = group(g, tail);
        for (int64_t i = 0; i < GROUP; i += LANES) {
            vf score = scores(x + i);
            vstore(weights + i, vwhere_ge(score, vset(floor_), vexp(score)));
        }
        double end = g ? ends_[g - 1] : 0;
        int64_t last = 0;  // where the sum in this order stays below the group's by rounding
        for (int64_t i = 0; i < GROUP; i++) {
            if (weights[i] == 0) continue;
            end += double(weights[last = i]);
            if (end > target) break;
        }
        return g * GROUP + last;
    }

    const float* x_;
    int64_t width_, groups_;
    Draw draw_;
    float* tops_;   // [padded groups] largest logits, then scores
    double* ends_;  // [groups] weights, then their sums up to each group's end
    float temperature_, top_ = 0, floor_ = LOWEST;
    bool random_ = false;
};

// Memory that calls share and keep.
struct Scratch {
    std::vector<Row> rows;
    std::vector<float> tops;
    std::vector<double> ends;
    std::vector<Candidates> candidates;  // a thread's own

    void make(const float* logits, int64_t count, int64_t width, int64_t stride, const Draw* draws, int64_t threads) {
        int64_t groups = groups_of(width);
        if (int64_t(tops.size()) < count * padded(groups)) tops.resize(size_t(count * padded(groups)));
        if (int64_t(ends.size()) < count * groups) ends.resize(size_t(count * groups));
        rows.clear();
        for (int64_t r = 0; r < count; r++)
            rows.emplace_back(logits + r * stride, width, draws ? draws[r] : Draw{}, tops.data() + r * padded(groups),
                              ends.data() + r * groups);
        // Room for a whole vector behind the last: what is passed over is written first.
        size_t room = size_t(groups * GROUP + GROUP);
        if (int64_t(candidates.size()) < threads) candidates.resize(size_t(threads));
        for (auto& each : candidates)
            if (each.values.size() < room) each.values.resize(room), each.weights.resize(room);
    }
};

Scratch& scratch() {
    static Scratch* the_scratch = new Scratch;
    return *the_scratch;
}

}  // namespace

void choose_from(const float* logits, int64_t rows, int64_t width, int64_t stride, const Draw* draws, int64_t threads) {
    scratch().make(logits, rows, width, stride, draws, threads);
}

void choose(Team& team, int thread, float* best, int64_t* tokens) {
    Scratch& s = scratch();
    Candidates& candidates = s.candidates[size_t(thread)];
    int64_t count = int64_t(s.rows.size()), begin, end;
    if (count % team.size() == 0 || count >= 4 * team.size()) {
        while (team.take(count, 1, begin, end)) s.rows[size_t(begin)].all(candidates, best[begin], tokens[begin]);
        return;
    }
    // What looks at whole rows is shared out by spans of groups.
    int64_t groups = s.rows[0].groups(), spans = (groups + SPAN - 1) / SPAN;
    auto by_spans = [&](auto&& work) {
        while (team.take(count * spans, 1, begin, end)) {
            int64_t from = begin % spans * SPAN;
            work(s.rows[size_t(begin / spans)], from, std::min(from + SPAN, groups));
        }
        team.barrier();
    };
    by_spans([](Row& row, int64_t from, int64_t to) { row.find_tops(from, to); });
    while (team.take(count, 1, begin, end)) s.rows[size_t(begin)].begin(candidates, best[begin], tokens[begin]);
    team.barrier();
    by_spans([](Row& row, int64_t from, int64_t to) { row.weigh(from, to); });
    while (team.take(count, 1, begin, end)) s.rows[size_t(begin)].finish(candidates, tokens[begin]);
}

}  // namespace folio

#pragma GCC visibility push(default)
extern "C" {

// Of each row of logits [rows, width] the largest value (NaN, if there is one) in `best`, and in `tokens` the token that
// `draws` [rows] means; where the largest is not finite, the least token that has it. 0, or 1 with folio_error saying why.
int64_t folio_draw(const float* logits, int64_t rows, int64_t width, const folio::Draw* draws, int64_t threads, float* best,
                   int64_t* tokens) {
    return folio::guarded([&] {
        if (rows < 1 || width < 1) return;
        std::lock_guard<std::mutex> held(folio::call_mutex());
        folio::choose_from(logits, rows, width, width, draws, threads);
        folio::run_team(int(threads), [&](folio::Team& team, int thread) { folio::choose(team, thread, best, tokens); });
    });
}

}  // extern "C"
#pragma GCC visibility pop
