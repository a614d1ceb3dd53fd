// Tokens drawn from rows of logits, without a softmax over all of them and without a sort.
#pragma once

#include <cstdint>

#include "pool.h"

namespace folio {

// How a row's token is chosen: with probabilities softmax(logits / temperature), of which min-p, then top-k, then top-p
// leave the likeliest; tokens that are as likely as the last of those stay too.
struct Draw {
    double temperature;  // 0: the likeliest token
    double min_p;        // share of the likeliest token's probability; 0 leaves all
    double top_k;        // tokens; below 1, or the vocabulary's size and more: leaves all
    double top_p;        // share of what the other cuts left; 1 leaves all
    double uniform;      // in [0, 1): where in the row's weights, walked in the vocabulary's order, the token lies
};

// Makes ready to choose a token of each row of logits [rows, width], `stride` from one to the next, as `draws` [rows] mean it; the likeliest, where that is
// null. The caller holds call_mutex until `choose` is done; the logits need not be there before.
void choose_from(const float* logits, int64_t rows, int64_t width, int64_t stride, const Draw* draws, int64_t threads);

// All threads of the team, which have met at a barrier since the logits were there: each row's largest logit (NaN, if there
// is one) in `best`, its token in `tokens`; where the largest is not finite, the least token that has it.
void choose(Team& team, int thread, float* best, int64_t* tokens);

}  // namespace folio
