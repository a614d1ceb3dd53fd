#include "linear.h"

#include <algorithm>
#include <vector>

#include "lora.h"
#include "octets.h"
#include "simd.h"
#include "tiles.h"

namespace folio {
namespace {

// Rows that go through panels together: they stay in a core's own cache. Whole tiles.
constexpr int64_t BLOCK = 240;
static_assert(BLOCK % ROWS == 0);

// gate = silu(gate + bias) · (up + its bias), rows of a panel; `width` of their columns are outputs.
void gate(float* gate, float* up, const float* bias, const float* up_bias, int64_t rows, int64_t width) {
    for (int64_t r = 0; r < rows; r++, gate += PANEL, up += PANEL) {
        if (bias)
            for (int64_t c = 0; c < width; c++) gate[c] += bias[c], up[c] += up_bias[c];
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++)
            vstore(gate + v * LANES, vmul(vsilu(vload(gate + v * LANES)), vload(up + v * LANES)));
    }
}

void write_tile(float* from, const float* bias, int64_t rows, int64_t width, float* to, int64_t ldo, bool add) {
    for (int64_t r = 0; r < rows; r++, from += PANEL, to += ldo) {
        if (bias)
            for (int64_t c = 0; c < width; c++) from[c] += bias[c];
        if (width < PANEL) {
            for (int64_t c = 0; c < width; c++) to[c] = add ? to[c] + from[c] : from[c];
            continue;
        }
        FOLIO_UNROLL
        for (int v = 0; v < NV; v++) {
            vf own = vload(from + v * LANES);
            vstore(to + v * LANES, add ? vadd(vload(to + v * LANES), own) : own);
        }
    }
}

int64_t total_panels(const FolioLinear& linear, Into into) {
    int64_t total = 0;
    for (int64_t i = 0; i < (into == Into::silu_mul ? 1 : linear.num_parts); i++) total += panels(linear.parts[i]);
    return total;
}

// Panels that each thread does without asking: half of all, so that the other half evens out what goes slower.
int64_t own_panels(int64_t total, int64_t threads) { return total / (2 * threads); }

// A product that threads share, and what one of them does.
class Multiplication {
public:
    Multiplication(const FolioLinear& linear, const Activations& x, int64_t rows, float* y, int64_t ldy, Into into,
                   LoraAddition lora)
        : linear_(linear), x_(x), rows_(rows), y_(y), ldy_(ldy), gated_(into == Into::silu_mul), add_(into == Into::add),
          lora_(lora), total_(total_panels(linear, into)) {}

    void run(Team& team, int thread) {
        octets_ = in_octets(linear_, rows_);
        if (octets_) outliers().make(x_, rows_, OCTET_TILE);
        int64_t own = rows_ <= WAITING_ROWS ? own_panels(total_, team.size()) : 0, given = own * team.size(), begin, end;
        if (own) panels_between(own * thread, own * (thread + 1));
        // Weights come from memory once. A thread takes long runs of panels, of which it asks for the next while it
        // multiplies one: what is asked for at a run's end another thread reads. With many rows it goes through all of them a
        // few panels at a time, so that both stay in its cache.
        int64_t step = octets_ ? OCTET_PANELS : 1, runs = octets_ ? 3 : 2, chunk = 2;
        if (rows_ <= BLOCK) chunk = std::max<int64_t>(1, total_ / (team.size() * runs) / step) * step;
        while (team.take(total_ - given, chunk, begin, end)) panels_between(begin + given, end + given);
    }

private:
    static TileOutliers& outliers() {
        thread_local TileOutliers own;
        return own;
    }

    // A panel of outputs.
    struct Unit {
        const FolioWeight* weight;
        int64_t part, panel, column, width;
    };

    Unit unit_at(int64_t unit) const {
        int64_t part = 0, column = 0;
        for (; unit >= panels(linear_.parts[part]); part++) {
            unit -= panels(linear_.parts[part]);
            column += linear_.parts[part].n;
        }
        const FolioWeight& weight = linear_.parts[part];
        return {&weight, part, unit, column + unit * PANEL, std::min<int64_t>(PANEL, weight.n - unit * PANEL)};
    }

    void panels_between(int64_t begin, int64_t end) {
        if (octets_) return octets_between(begin, end);
        thread_local std::vector<uint8_t> memory[2];
        alignas(64) float own[ROWS * PANEL], up[ROWS * PANEL];
        for (int64_t block = 0; block < rows_; block += BLOCK)
            for (int64_t at = begin; at < end; at++) {
                Unit unit = unit_at(at);
                Factor main = factor(*unit.weight, unit.panel, memory[0]), second;
                if (gated_) second = factor(linear_.parts[1], unit.panel, memory[1]);
                int64_t step = std::min(main.rows, gated_ ? second.rows : int64_t(ROWS)), stop = std::min(block + BLOCK, rows_);
                for (int64_t row = block; row < stop; row += step) {
                    int64_t here = std::min(step, stop - row);
                    for (int64_t r = 0; r < here; r++) __builtin_prefetch(y_ + (row + r) * ldy_ + unit.column, 1);
                    multiply(main, unit.panel, row, here, row == block, own);
                    if (gated_) multiply(second, unit.panel, row, here, row == block, up);
                    finish(unit, row, here, own, up);
                }
            }
    }

    // The same with bytes, which are made for all rows of a block: of two panels at a time, or of the gate's and the other.
    void octets_between(int64_t begin, int64_t end) {
        thread_local Aligned<uint8_t> memory[OCTET_PANELS];
        thread_local Aligned<float> columns[OCTET_PANELS];
        alignas(64) float sums[OCTET_PANELS][OCTET_TILE * PANEL];
        int64_t step = gated_ ? 1 : OCTET_PANELS;
        for (int64_t block = 0; block < rows_; block += BLOCK)
            for (int64_t at = begin; at < end; at += step) {
                Unit first = unit_at(at), second = first;
                int64_t panels = gated_ || at + 1 < end ? 2 : 1, stop = std::min(block + BLOCK, rows_);
                if (gated_)
                    second.weight = &linear_.parts[1];
                else if (panels == 2)
                    second = unit_at(at + 1);
                OctetPanel pair[OCTET_PANELS] = {};
                for (int64_t i = 0; i < panels; i++) {
                    const Unit& unit = i ? second : first;
                    make_octets(*unit.weight, unit.panel, memory[i]);
                    outliers().columns_of(*unit.weight, unit.panel, columns[i]);
                    pair[i] = {memory[i].data(), columns[i].data(), sums[i]};
                }
                Lines next;  // weights, which come while these are multiplied
                for (const Unit* unit : {&first, &second})
                    next.add(panel_data(*unit->weight, unit->panel + step), packed_bytes(unit->weight->format, PANEL, x_.k));
                int lines = int(packed_bytes(first.weight->format, PANEL, x_.k) * OCTET_TILE / (64 * (stop - block))) + 1;
                for (int64_t row = block; row < stop; row += OCTET_TILE) {
                    int64_t here = std::min(OCTET_TILE, stop - row);
                    next.fetch(lines);
                    for (int64_t r = 0; r < here; r++) {
                        float* to = y_ + (row + r) * ldy_;
                        __builtin_prefetch(to + first.column, 1), __builtin_prefetch(to + second.column, 1);
                    }
                    multiply_octets(pair, panels, x_, outliers(), row, here);
                    finish(first, row, here, sums[0], sums[1]);
                    if (!gated_ && panels == 2) finish(second, row, here, sums[1], nullptr);
                }
            }
    }

    // A panel's weights as they are multiplied: expanded, or where they lie; and so many rows at once.
    struct Factor {
        const FolioWeight* weight = nullptr;
        const uint8_t* expanded = nullptr;
        int64_t rows = 0;
    };

    Factor factor(const FolioWeight& weight, int64_t panel, std::vector<uint8_t>& memory) const {
        if (!has_nibbles(weight)) return {&weight, nullptr, ROWS};
        if (x_.together == 1) return {&weight, nullptr, ROWS4};
        if (!EXPANDS) return {&weight, nullptr, ROWS};
        expand(weight, panel, memory);
        return {&weight, memory.data(), ROWS};
    }

    void multiply(const Factor& by, int64_t panel, int64_t row, int64_t rows, bool ahead, float* to) const {
        if (by.expanded)
            multiply_expanded(*by.weight, panel, by.expanded, x_, row, rows, ahead, to);
        else
            multiply_stored(*by.weight, panel, x_, row, rows, ahead, to);
    }

    // Sums of some rows (gated: of the gate, and of what it gates) to where they belong, with what adapters add.
    void finish(const Unit& unit, int64_t row, int64_t rows, float* own, float* up) const {
        const float* bias = linear_.bias ? linear_.bias + unit.column : nullptr;
        if (lora_.rows) lora_.rows->expand(lora_.index, unit.part, unit.panel, row, rows, own);
        if (gated_) {
            if (lora_.rows) lora_.rows->expand(lora_.index, 1, unit.panel, row, rows, up);
            gate(own, up, bias, bias ? bias + unit.weight->n : nullptr, rows, unit.width);
            bias = nullptr;
        }
        write_tile(own, bias, rows, unit.width, y_ + row * ldy_ + unit.column, ldy_, add_);
    }

    const FolioLinear& linear_;
    const Activations& x_;
    int64_t rows_;
    float* y_;
    int64_t ldy_;
    bool gated_, add_;
    LoraAddition lora_;
    int64_t total_;
    bool octets_ = false;
};

}  // namespace

Lines first_lines(const FolioLinear& linear, Into into, int64_t threads, int64_t thread) {
    constexpr int64_t MOST = 128 << 10;  // bytes of a matrix: what is fetched must stay in a core's own cache
    int64_t own = own_panels(total_panels(linear, into), threads), panel = own * thread, part = 0;
    for (; panel >= panels(linear.parts[part]); part++) panel -= panels(linear.parts[part]);
    Lines lines;
    for (int64_t i = part; i < (into == Into::silu_mul ? 2 : part + 1); i++) {
        const FolioWeight& weight = linear.parts[i];
        int64_t each = packed_bytes(weight.format, PANEL, weight.k), count = std::min(own, panels(weight) - panel);
        lines.add(panel_data(weight, panel), std::min(count * each, MOST));
    }
    return lines;
}

void linear(Team& team, int thread, const FolioLinear& linear, const Activations& x, int64_t rows, float* y, int64_t ldy,
            Into into, LoraAddition lora) {
    Multiplication(linear, x, rows, y, ldy, into, lora).run(team, thread);
}

}  // namespace folio
