// A step's tokens in lots, each of which one thread at a time takes through a layer alone.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "abi.h"

namespace folio {

// Every lot goes through the same passes, a layer's attention and what follows it in each. Threads take passes of lots in one
// order, all lots' first passes before anybody's second. So whoever waits for a pass before its own waits for one that
// another thread has taken already, and nobody waits for the slowest: there is no barrier before the last pass ends.
class Lots {
public:
    // None at all: threads share everything else.
    void clear() { cuts_.clear(); }

    // `count` lots of about as many tokens, in whole `tile`s.
    void make(const FolioStep& step, int64_t groups, int64_t count, int64_t tile);

    int64_t count() const { return cuts_.empty() ? 0 : int64_t(cuts_.size()) - 1; }
    int64_t begin(int64_t lot) const { return cuts_[size_t(lot)]; }
    int64_t end(int64_t lot) const { return cuts_[size_t(lot) + 1]; }
    int64_t largest() const;
    // The lot that a token is in.
    int64_t of(int64_t token) const;

    // Until the keys and values that a lot's tokens see, its own among them, went through `passes` passes.
    void wait(int64_t lot, uint32_t passes) const;
    // A lot went through one more pass.
    void end_pass(int64_t lot);

private:
    void need_blocks(const FolioStep& step, const FolioGroup& group);

    struct alignas(64) Passes {
        std::atomic<uint32_t> done{0};
    };

    std::vector<int64_t> cuts_;    // [count + 1] first tokens
    std::vector<int64_t> needed_;  // [count] the last lot that writes what this one reads
    std::unique_ptr<Passes[]> passes_;
    int64_t room_ = 0;  // for passes of so many lots
};

}  // namespace folio
