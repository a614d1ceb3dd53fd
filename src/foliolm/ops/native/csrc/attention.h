// Attention of a packed mixed batch over block tables.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "abi.h"
#include "attention_bytes.h"
#include "lots.h"
#include "pages.h"
#include "pool.h"

namespace folio {

constexpr int64_t SPLIT = 256;  // keys of one work item of a row with a single query
constexpr int64_t TILE = 192;   // rows (queries times the heads that share a KV head) of a work item at most

// Where results go: [tokens, heads · dim], of tokens from `first` on.
struct Attended {
    float* rows;
    int64_t first;
};

// A KV group's work of a step, made once and used by each of its layers.
class AttentionPlan {
public:
    // Work is handed out to all threads, or, if there are lots, lot by lot.
    void make(const FolioStep& step, const FolioGroup& group, int64_t heads, int64_t kv_heads, int64_t dim, const Lots& lots);

    // Queries [heads / kv_heads, dim] of a token and a KV head, already rotated, made ready, perhaps in place: each of them
    // before a barrier before run.
    void take_queries(int64_t token, int64_t kv_head, float* q) {
        if (in_bytes()) queries_.set(token, kv_head, q);
    }

    // All threads: q [tokens][ldq], heads side by side, to out [tokens, heads · dim]. Ends with a barrier.
    // With `outputs`, tokens that are not the step's outputs may be left out.
    void run(Team& team, int thread, const Pages& pages, const float* q, int64_t ldq, float* out, Lines* coming = nullptr,
             bool outputs = false);

    // One thread: the same of a lot's tokens.
    void run_lot(int thread, int64_t lot, const Pages& pages, const float* q, int64_t ldq, Attended out, bool outputs = false);

    // Whether queries are not asked for again once they were taken.
    bool keeps_queries() const { return in_bytes(); }

    // Pieces that the work is handed out in.
    int64_t num_items() const { return int64_t(items_.size()); }

private:
    bool in_bytes() const { return turned_ && has_byte_panels(dim_); }

    struct Item {
        int32_t row, head, heads;    // KV heads head … head + heads
        int32_t first, count;        // queries first … first + count of the row
        int32_t begin, end;          // keys
        int32_t lot;
        int32_t member, members;     // of a single query: the rows that share these keys, a list in members_
    };
    // A row with a single query that meets an item's keys.
    struct Member {
        int32_t token, next;
        int32_t part, splits;  // the first head's place among split results, or −1, and how far the next one's is
        int32_t merge;         // of the first head's
    };
    // A row's and head's results of its parts, to be made one by whoever makes the last of them.
    struct Merge {
        int32_t token, head, part, parts;
    };
    struct Scratch {
        std::vector<float> q, keys, values, scores, out, top, sum;
        std::vector<const Member*> members;
        std::vector<int8_t> q_bytes;  // with q as the factors, where keys and values are bytes
        std::vector<int32_t> starts, ends;  // of a row's scores (see query_bytes), and behind the last key that it sees
        ByteUnit units[BYTE_HEADS];
    };

    void compute(const Item& item, const Item* next, const Pages& pages, const float* q, int64_t ldq, Attended out, Scratch& s);
    void single(const Item& item, const Pages& pages, const float* q, int64_t ldq, Attended out, Scratch& s);
    void tile(const Item& item, const Pages& pages, const float* q, int64_t ldq, Attended out, Scratch& s);
    void bytes(const Item& item, const Item* next, const Pages& pages, Attended out, Scratch& s);
    void merge_if_last(int64_t index, Attended out);
    void gather_queries(const Item& item, Scratch& s) const;
    void gather(const Item& item, const Pages& pages, int64_t begin, Runs& runs) const;
    template <class K>
    void single_unit(const Pages& pages, const uint8_t* const* keys, const uint8_t* const* values, int64_t count,
                     int64_t first, Scratch& s) const;
    void take_query(const float* from, float factor, float* to) const;
    void add_single(Item item, Member member);
    bool has_output(const Item& item) const;
    bool same_blocks(const Item& a, const Item& b) const;
    int64_t rows_of(const Item& item) const;
    void begin_item(const Item& item, Scratch& s) const;
    float* place(Attended out, int64_t token, int64_t head) const {
        return out.rows + ((token - out.first) * heads_ + head) * dim_;
    }
    void end_item(const Item& item, Attended out, const Scratch& s);

    const FolioStep* step_ = nullptr;
    const FolioGroup* group_ = nullptr;
    int64_t heads_ = 0, kv_heads_ = 0, dim_ = 0, shared_ = 0, padded_ = 0;
    bool turned_ = false;
    int64_t held_ = 0;  // items left that no thread takes before it has done its last one
    std::vector<Item> items_, of_outputs_;  // all of them, and those that have an output
    std::vector<Member> members_;
    std::unordered_multimap<int32_t, int32_t> by_block_;  // items of single queries by their first block
    std::vector<Merge> merges_;
    std::unique_ptr<std::atomic<int32_t>[]> missing_;  // [merges] parts
    int64_t room_ = 0;                                 // for so many merges
    ByteQueries queries_;
    std::vector<float> partial_;  // a split's results: [shared][padded + 2] each
    std::vector<Scratch> scratch_;
};

}  // namespace folio
