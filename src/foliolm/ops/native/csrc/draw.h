// Tokens drawn from rows of logits, without a softmax over all of them and without a sort.
#pragma once

#include <cstdint>

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

}  // namespace folio
