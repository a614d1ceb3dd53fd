// The kernels on small random inputs, to be run under AddressSanitizer and UBSan: every buffer is exactly as large as the
// interface says, so that a read or write beyond it is found. Results are compared with plain loops in double.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "abi.h"
#include "attention.h"
#include "draw.h"
#include "linear.h"
#include "lora.h"
#include "lots.h"
#include "octets.h"
#include "rotation.h"
#include "tiles.h"

using namespace folio;

static std::mt19937 random_bits(7);

static float normal() {
    static std::normal_distribution<float> draw;
    return draw(random_bits);
}

static int failures = 0;

static void expect(bool holds, const char* what, double error) {
    if (!holds) {
        std::printf("FAILED %s: error %g\n", what, error);
        failures++;
    }
}

// A product of parts of `formats`, of which part i has n + i outputs. In each row one value is `outlier`, if that is not 0.
static void check_linear(std::vector<int64_t> formats, int64_t n, int64_t k, int64_t rows, int threads, float outlier = 0) {
    FolioLinear weights{};
    weights.num_parts = int64_t(formats.size());
    std::vector<std::vector<uint8_t>> packed(formats.size());
    int64_t width = 0;
    for (size_t i = 0; i < formats.size(); i++) {
        int64_t own = n + int64_t(i);
        std::vector<float> w(size_t(own * k));
        for (auto& value : w) value = normal();
        packed[i].resize(static_cast<size_t>(packed_bytes(formats[i], own, k)));
        pack_floats(formats[i], own, k, w.data(), packed[i].data());
        weights.parts[i] = {formats[i], own, k, packed[i].data()};
        width += own;
    }
    std::vector<float> x(size_t(rows * k)), line(static_cast<size_t>(k)), y(size_t(rows * width)), bias(static_cast<size_t>(width));
    for (auto* each : {&x, &bias})
        for (auto& value : *each) value = normal();
    if (outlier != 0)
        for (int64_t r = 0; r < rows; r++) x[size_t(r * k + 37 * (r + 3) % k)] = outlier;
    weights.bias = bias.data();
    Activations activations;
    activations.shape(weights, rows);
    for (int64_t r = 0; r < rows; r++) activations.set(r, x.data() + r * k);
    run_team(threads, [&](Team& team, int thread) {
        linear(team, thread, weights, activations, rows, y.data(), width, Into::store);
        team.barrier();
    });
    int64_t column = 0;
    for (size_t i = 0; i < formats.size(); i++) {
        bool rounded = formats[i] == FOLIO_BF16 && in_pairs(rows);
        double worst = 0, top = 1e-6;
        for (int64_t c = 0; c < weights.parts[i].n; c++, column++) {
            unpack_row(weights.parts[i], c, line.data());
            for (int64_t r = 0; r < rows; r++) {
                double sum = bias[size_t(column)];
                for (int64_t j = 0; j < k; j++) {
                    float own = x[size_t(r * k + j)];
                    sum += double(line[size_t(j)]) * double(rounded ? bf16_to_float(float_to_bf16(own)) : own);
                }
                worst = std::max(worst, std::fabs(sum - double(y[size_t(r * width + column)])));
                top = std::max(top, std::fabs(sum));
            }
        }
        int64_t format = formats[i];
        bool wide = format == FOLIO_I8 || (format == FOLIO_Q8_0 && !in_bytes(rows));  // 16-bit activations
        double limit = format == FOLIO_F32 || format == FOLIO_BF16 ? 1e-5 : wide ? 1e-3 : 0.03;
        // 8 bits alone would be wrong by five times that, beside such a value; weights in 8 bits are wrong by as much of it.
        if (outlier != 0) limit = in_octets(weights, rows) ? 0.006 : 0.003;
        expect(worst / top < limit, outlier != 0 ? "linear with outliers" : "linear", worst / top);
    }
}

// Entry (i, j) of a block of a Hadamard matrix is 1 where i and j have an even number of bits in common, else −1.
extern "C" int64_t folio_linear(const FolioLinear*, const float*, int64_t, float*, int64_t, int64_t, const FolioLora*, int64_t);
extern "C" int64_t folio_likeliest(const FolioLinear*, const float*, int64_t, int64_t, int64_t, float*, int64_t*);

// The likeliest of each row's outputs is the first of the largest that the product itself gives.
static void check_likeliest(int64_t n, int64_t rows, int threads) {
    const int64_t k = 33;
    std::vector<float> w(size_t(n * k)), x(size_t(rows * k)), y(size_t(rows * n)), best(static_cast<size_t>(rows));
    for (auto* each : {&w, &x})
        for (auto& value : *each) value = normal();
    std::vector<uint8_t> packed(static_cast<size_t>(packed_bytes(FOLIO_F32, n, k)));
    pack_floats(FOLIO_F32, n, k, w.data(), packed.data());
    FolioLinear weights{};
    weights.num_parts = 1;
    weights.parts[0] = {FOLIO_F32, n, k, packed.data()};
    std::vector<int64_t> index(static_cast<size_t>(rows));
    int64_t failed = folio_linear(&weights, x.data(), rows, y.data(), threads, 0, nullptr, 0);
    failed += folio_likeliest(&weights, x.data(), rows, threads, 0, best.data(), index.data());
    expect(!failed, "likeliest", double(failed));
    for (int64_t r = 0; r < rows; r++) {
        const float* row = y.data() + r * n;
        int64_t first = std::max_element(row, row + n) - row;
        expect(index[size_t(r)] == first && best[size_t(r)] == row[first], "likeliest", double(index[size_t(r)] - first));
    }
}

extern "C" int64_t folio_draw(const float*, int64_t, int64_t, const Draw*, int64_t, float*, int64_t*);

// Each token is one that the cuts leave, and its place among the weights holds its number, but for rounding. Some logits
// are −inf, some rows odd: those have only to end.
static void check_draws(int64_t width, int64_t rows, int threads, Draw draw) {
    std::vector<float> x(size_t(rows * width)), best(static_cast<size_t>(rows));
    for (auto& value : x) value = random_bits() % 8 ? 3 * normal() : -INFINITY;
    for (int64_t r = 0; r < rows; r++) x[size_t(r * width + r % width)] = r == 2 ? NAN : r == 3 ? INFINITY : 1;
    std::vector<Draw> draws(size_t(rows), draw);
    for (auto& each : draws) each.uniform = double(random_bits()) / 4294967296.0;
    std::vector<int64_t> tokens(static_cast<size_t>(rows));
    expect(!folio_draw(x.data(), rows, width, draws.data(), threads, best.data(), tokens.data()), "draw", 1);
    for (int64_t r = 0; r < rows; r++) {
        const float* row = x.data() + r * width;
        int64_t token = tokens[size_t(r)];
        expect(token >= 0 && token < width, "draw: a token", double(token));
        float top = *std::max_element(row, row + width);
        if (r == 2 || r == 3) continue;
        expect(best[size_t(r)] == top, "draw: the largest", double(best[size_t(r)]));
        std::vector<double> sorted(row, row + width);
        std::sort(sorted.begin(), sorted.end(), std::greater<double>());
        auto weight = [&](double logit) { return std::exp((logit - double(top)) / draw.temperature); };
        double floor = sorted[size_t(draw.top_k >= 1 && draw.top_k < double(width) ? draw.top_k - 1 : double(width - 1))];
        if (draw.min_p > 0) floor = std::max(floor, double(top) + draw.temperature * std::log(draw.min_p));
        double mass = 0, reached = 0, before = 0, total = 0;
        for (double logit : sorted) mass += logit >= floor ? weight(logit) : 0;
        for (double logit : sorted)
            if (logit >= floor && reached < draw.top_p * mass) reached += weight(logit), total = logit;
        if (draw.top_p < 1) floor = total;
        total = 0;
        for (int64_t i = 0; i < width; i++) {
            if (i == token) before = total;
            total += double(row[i]) >= floor ? weight(double(row[i])) : 0;
        }
        double target = draws[size_t(r)].uniform * total, after = before + weight(double(row[token]));
        expect(double(row[token]) >= floor - 1e-5, "draw: what was cut", floor - double(row[token]));
        expect(before <= target + 1e-5 * total && after >= target - 1e-5 * total, "draw: the place", target - before);
    }
}

static void check_rotation(int64_t k) {
    std::vector<float> x(static_cast<size_t>(k)), turned(x.size());
    for (auto& value : x) value = normal();
    hadamard(x.data(), k, turned.data());
    double worst = 0;
    for (int64_t first = 0; first < k;) {
        int64_t size = 64;
        while (size > k - first) size /= 2;
        for (int64_t i = 0; i < size; i++) {
            double sum = 0;
            for (int64_t j = 0; j < size; j++)
                sum += (__builtin_popcountll(static_cast<unsigned long long>(i & j)) % 2 ? -1.0 : 1.0) * double(x[size_t(first + j)]);
            worst = std::max(worst, std::fabs(sum / std::sqrt(double(size)) - double(turned[size_t(first + i)])));
        }
        first += size;
    }
    hadamard(turned.data(), k, turned.data());
    for (size_t i = 0; i < x.size(); i++) worst = std::max(worst, std::fabs(double(x[i]) - double(turned[i])));
    expect(worst < 2e-6, "rotation", worst);
}

// Adapters of `ranks` (0: none) on a product, rows of each of them and of none mixed.
static void check_lora(int64_t format, int64_t stored, int64_t n, int64_t k, int64_t rows, std::vector<int64_t> ranks, int threads) {
    size_t count = ranks.size();
    std::vector<float> w(size_t(n * k)), x(size_t(rows * k)), y(size_t(rows * n)), bare(y.size()), line(static_cast<size_t>(k));
    for (auto* each : {&w, &x})
        for (auto& value : *each) value = normal();
    std::vector<uint8_t> packed(static_cast<size_t>(packed_bytes(format, n, k)));
    pack_floats(format, n, k, w.data(), packed.data());
    FolioLinear weights{};
    weights.num_parts = 1;
    weights.parts[0] = {format, n, k, packed.data()};
    std::vector<std::vector<uint8_t>> matrices(2 * count);
    std::vector<FolioLoraLinear> linears(count);
    std::vector<const FolioLoraLinear*> adapters;
    for (size_t i = 0; i < count; i++) {
        int64_t rank = ranks[i];
        linears[i] = {};
        if (rank) {
            int64_t sizes[2][2] = {{rank, k}, {n, rank}};
            for (size_t side = 0; side < 2; side++) {
                std::vector<float> values(size_t(sizes[side][0] * sizes[side][1]));
                for (auto& value : values) value = normal();
                auto& into = matrices[2 * i + side];
                into.resize(static_cast<size_t>(packed_bytes(stored, sizes[side][0], sizes[side][1])));
                pack_floats(stored, sizes[side][0], sizes[side][1], values.data(), into.data());
                (side ? linears[i].b[0] : linears[i].a) = {stored, sizes[side][0], sizes[side][1], into.data()};
            }
        }
        adapters.push_back(&linears[i]);
    }
    std::vector<int32_t> slots;
    for (int64_t r = 0; r < rows; r++) slots.push_back(int32_t(random_bits() % (count + 1)) - 1);
    FolioLora lora{int64_t(count), adapters.data(), slots.data(), nullptr};
    LoraRows by_adapter;
    by_adapter.make(lora, slots.data(), rows, lora_width(lora, slots.data(), rows, 1));
    for (bool adapted : {false, true}) {
        LoraAddition addition;
        if (adapted && by_adapter.uses(0)) addition = {&by_adapter, 0};
        Activations activations;
        activations.shape(weights, rows, addition.rows != nullptr);
        for (int64_t r = 0; r < rows; r++) activations.set(r, x.data() + r * k);
        float* out = adapted ? y.data() : bare.data();
        run_team(threads, [&](Team& team, int thread) {
            if (addition.rows) by_adapter.shrink(team, 0, activations);
            team.barrier();
            linear(team, thread, weights, activations, rows, out, n, Into::store, addition);
            team.barrier();
        });
    }
    double worst = 0, top = 1e-6;
    for (int64_t r = 0; r < rows; r++) {
        int32_t slot = slots[size_t(r)];
        std::vector<double> shrunk;
        int64_t rank = slot < 0 ? 0 : ranks[size_t(slot)];
        for (int64_t j = 0; j < rank; j++) {
            unpack_row(linears[size_t(slot)].a, j, line.data());
            double sum = 0;
            for (int64_t i = 0; i < k; i++) sum += double(line[size_t(i)]) * double(x[size_t(r * k + i)]);
            shrunk.push_back(sum);
        }
        std::vector<float> row(static_cast<size_t>(std::max<int64_t>(rank, 1)));
        for (int64_t c = 0; c < n; c++) {
            double sum = double(bare[size_t(r * n + c)]);
            if (rank) unpack_row(linears[size_t(slot)].b[0], c, row.data());
            for (int64_t j = 0; j < rank; j++) sum += shrunk[size_t(j)] * double(row[size_t(j)]);
            worst = std::max(worst, std::fabs(sum - double(y[size_t(r * n + c)])));
            top = std::max(top, std::fabs(sum));
        }
    }
    expect(worst / top < 1e-5, "lora", worst / top);
}

// Where a step's tokens write, and the step's only group.
struct Written {
    std::vector<int64_t> slots;
    FolioGroup group;

    Written(const std::vector<int32_t>& table, int64_t width, int64_t window, int64_t p, const std::vector<int32_t>& starts,
            const std::vector<int32_t>& used) {
        for (size_t r = 0; r < used.size(); r++)
            for (int64_t at = used[r] - (starts[r + 1] - starts[r]); at < used[r]; at++)
                slots.push_back(table[r * size_t(width) + size_t(at / p)] * p + at % p);
        group = {table.data(), width, slots.data(), window};
    }
};

// What a step's attention gives, of its `outputs` only if there are any, and the pieces that it was handed out in. In so many
// lots, or handed out to all.
static std::vector<float> attend(const Pages& pages, const std::vector<int32_t>& table, int64_t width, int64_t window,
                                 const std::vector<int32_t>& starts, const std::vector<int32_t>& used, int64_t heads,
                                 const std::vector<float>& q, int threads, int64_t& items,
                                 const std::vector<int64_t>& outputs = {}, int64_t lot_count = 0) {
    Written written(table, width, window, pages.block_size, starts, used);
    const FolioGroup& group = written.group;
    FolioStep step{};
    step.num_tokens = starts.back(), step.num_rows = int64_t(used.size()), step.starts = starts.data(), step.used = used.data();
    step.block_size = pages.block_size, step.kv_format = pages.format, step.threads = threads, step.groups = &group;
    step.outputs = outputs.data(), step.num_outputs = int64_t(outputs.size());
    Lots lots;
    if (lot_count) lots.make(step, 1, lot_count, 3);
    AttentionPlan plan;
    plan.make(step, group, heads, pages.kv_heads, pages.head_dim, lots);
    items = plan.num_items();
    std::vector<float> out(q.size()), taken = q;
    int64_t shared = heads / pages.kv_heads, size = shared * pages.head_dim;
    for (int64_t i = 0; i < step.num_tokens * pages.kv_heads; i++)
        plan.take_queries(i / pages.kv_heads, i % pages.kv_heads, taken.data() + i * size);
    run_team(threads, [&](Team& team, int thread) {
        int64_t ldq = heads * pages.head_dim, lot, end;
        if (!lot_count) return plan.run(team, thread, pages, q.data(), ldq, out.data(), nullptr, !outputs.empty());
        while (team.take(lots.count(), 1, lot, end)) {
            int64_t first = lots.begin(lot);
            std::vector<float> own(size_t((lots.end(lot) - first) * ldq));
            plan.run_lot(thread, lot, pages, q.data(), ldq, {own.data(), first}, !outputs.empty());
            std::copy(own.begin(), own.end(), out.data() + first * ldq);
        }
    });
    return out;
}

static void check_attention(int64_t format, int64_t heads, int64_t kv_heads, int64_t dim, int64_t p, int64_t window, int threads) {
    const int64_t rows = 4, news[rows] = {1, 1, 5, 70}, used[rows] = {3, 1100, 9, 75};
    int64_t width = (1100 + p - 1) / p, num_blocks = rows * width + 1;
    std::vector<int32_t> starts{0}, table(static_cast<size_t>(rows * width)), lengths;
    std::vector<int32_t> ids(static_cast<size_t>(num_blocks - 1));
    for (size_t i = 0; i < ids.size(); i++) ids[i] = int32_t(i + 1);
    std::shuffle(ids.begin(), ids.end(), random_bits);
    for (size_t i = 0; i < table.size(); i++) table[i] = ids[i];
    for (int64_t r = 0; r < rows; r++) starts.push_back(starts.back() + int32_t(news[r])), lengths.push_back(int32_t(used[r]));
    Pages shape{nullptr, nullptr, p, kv_heads, dim, format};
    std::vector<uint8_t> keys(static_cast<size_t>(num_blocks * p * kv_heads * shape.row_bytes())), values(keys.size());
    Pages pages{keys.data(), values.data(), p, kv_heads, dim, format};
    std::vector<float> key(static_cast<size_t>(dim)), value(key.size());
    for (int64_t slot = 0; slot < num_blocks * p; slot++)
        for (int64_t head = 0; head < kv_heads; head++) {
            for (auto* each : {&key, &value})
                for (auto& x : *each) x = normal();
            pages.write(slot, head, key.data(), value.data());
        }
    // What lies behind a row's last token is left of others; nobody may take it in.
    std::vector<float> nothing(static_cast<size_t>(dim), std::numeric_limits<float>::quiet_NaN());
    for (int64_t r = 0; r < rows; r++)
        for (int64_t t = used[r]; t < used[r] + 2 * p && t < width * p; t++)
            for (int64_t head = 0; head < kv_heads; head++)
                pages.write(table[size_t(r * width + t / p)] * p + t % p, head, nothing.data(), nothing.data());
    int64_t tokens = starts.back();
    std::vector<float> q(static_cast<size_t>(tokens * heads * dim));
    for (auto& value : q) value = normal();
    int64_t items;
    auto out = attend(pages, table, width, window, starts, lengths, heads, q, threads, items);

    // Of outputs only: the same for them, nothing for a row that has none.
    std::vector<int64_t> outputs{0, 1, tokens - 1};
    auto some = attend(pages, table, width, window, starts, lengths, heads, q, threads, items, outputs);
    int64_t other = 0, each = heads * dim, without = starts[2];
    auto from = [&](const std::vector<float>& all, int64_t token) { return all.data() + token * each; };
    for (int64_t token : outputs) other += !std::equal(from(some, token), from(some, token + 1), from(out, token));
    other += std::count_if(from(some, without), from(some, without + 1), [](float x) { return x != 0; });
    expect(other == 0, "attention of outputs", double(other));

    // In lots the same, in bytes by every bit; floats of a single query are summed in another order, and where keys are seen
    // from some on only, sums may begin elsewhere.
    bool in_bytes = format == FOLIO_KV_I8 && has_byte_panels(dim);
    for (int64_t lots : {1, 5, 40}) {
        auto lot_by_lot = attend(pages, table, width, window, starts, lengths, heads, q, threads, items, {}, lots);
        auto of_outputs = attend(pages, table, width, window, starts, lengths, heads, q, threads, items, outputs, lots);
        float apart = 0;
        for (size_t i = 0; i < out.size(); i++) apart = std::max(apart, std::fabs(out[i] - lot_by_lot[i]));
        expect(apart <= (!in_bytes ? 1e-5f : window ? 0.05f : 0), "attention in lots", double(apart));
        int64_t unlike = 0;
        for (int64_t token : outputs)
            unlike += !std::equal(from(of_outputs, token), from(of_outputs, token + 1), from(lot_by_lot, token));
        expect(unlike == 0, "attention of outputs in lots", double(unlike));
    }

    // What is stored, turned back where it is in bytes: [slots, kv_heads, dim].
    auto read_all = [&](const std::vector<uint8_t>& pool, bool are_keys) {
        std::vector<float> read(static_cast<size_t>(num_blocks * p * kv_heads * dim));
        for (int64_t slot = 0; slot < num_blocks * p; slot++)
            for (int64_t head = 0; head < kv_heads; head++) {
                const uint8_t* at = pool.data() + pages.offset(slot, head);
                float* to = read.data() + (slot * kv_heads + head) * dim;
                int64_t token = slot % pages.run();
                float scale = 1;
                if (format == FOLIO_KV_I8) std::memcpy(&scale, at + pages.run() * dim + token * 4, 4);
                for (int64_t i = 0; i < dim; i++) {
                    if (format == FOLIO_KV_F32) {
                        std::memcpy(to + i, at + 4 * i, 4);
                    } else if (format == FOLIO_KV_BF16) {
                        uint32_t bits = uint32_t(at[2 * i] | at[2 * i + 1] << 8) << 16;
                        std::memcpy(to + i, &bits, 4);
                    } else if (!pages.in_panels()) {
                        to[i] = scale * float(int8_t(at[i]));
                    } else {
                        to[i] = scale * float(int8_t(at[are_keys ? key_place(token, i) : value_place(token, i)]));
                    }
                }
                if (format == FOLIO_KV_I8) hadamard(to, dim, to);
            }
        return read;
    };
    auto all_keys = read_all(keys, true), all_values = read_all(values, false);
    double worst = 0, all = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < news[r]; i++)
            for (int64_t h = 0; h < heads; h++) {
                int64_t position = used[r] - news[r] + i, low = window ? std::max<int64_t>(0, position + 1 - window) : 0;
                int64_t token = starts[size_t(r)] + i;
                std::vector<double> sums(static_cast<size_t>(dim));
                double total = 0;
                for (int64_t t = low; t <= position; t++) {
                    int64_t slot = table[size_t(r * width + t / p)] * p + t % p;
                    size_t at = size_t((slot * kv_heads + h / (heads / kv_heads)) * dim);
                    double score = 0;
                    for (int64_t d = 0; d < dim; d++) score += double(q[size_t((token * heads + h) * dim + d)]) * double(all_keys[at + size_t(d)]);
                    double weight = std::exp(score / std::sqrt(double(dim)));
                    total += weight;
                    for (int64_t d = 0; d < dim; d++) sums[size_t(d)] += weight * double(all_values[at + size_t(d)]);
                }
                for (int64_t d = 0; d < dim; d++) {
                    double error = std::fabs(sums[size_t(d)] / total - double(out[size_t((token * heads + h) * dim + d)]));
                    worst = std::max(worst, error), all += error;
                }
            }
    // Queries and weights have 7 or 8 bits where whole numbers are multiplied.
    expect(worst < (in_bytes ? 0.1 : 1e-4), "attention", worst);
    expect(all / double(out.size()) < (in_bytes ? 0.01 : 1e-5), "attention on average", all / double(out.size()));
}

// Rows that share blocks read them together; nobody's result may differ by a bit from what it is with copies of its own.
static void check_shared(int64_t format, int64_t p, int64_t window, int64_t rows, bool shares, int threads) {
    const int64_t heads = 9, kv_heads = 3, dim = 64, width = 1100 / p, common = 520 / p;
    std::vector<int32_t> starts{0}, used, table(size_t(rows * width)), copies(table.size());
    for (int64_t r = 0; r < rows; r++) {
        starts.push_back(int32_t(r + 1));
        used.push_back(int32_t(window ? 530 + r : r % 4 == 3 ? 40 + r : 530 + 60 * (r % 7)));
    }
    int32_t last = 0;
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < width; i++) {
            size_t at = size_t(r * width + i);
            copies[at] = ++last;
            // Every fifth row shares less than the others: its second split is another.
            table[at] = r && i < (r % 5 == 4 ? 300 / p : common) ? table[size_t(i)] : copies[at];
        }
    Pages pages{nullptr, nullptr, p, kv_heads, dim, format};
    size_t block_bytes = size_t(p * kv_heads * pages.row_bytes());
    std::vector<uint8_t> keys((size_t(last) + 1) * block_bytes), values(keys.size());
    pages.keys = keys.data(), pages.values = values.data();
    std::vector<float> key(static_cast<size_t>(dim)), value(key.size()), q(static_cast<size_t>(rows * heads * dim));
    for (int64_t slot = 0; slot < (last + 1) * p; slot++)
        for (int64_t head = 0; head < kv_heads; head++) {
            for (auto* each : {&key, &value})
                for (auto& x : *each) x = normal();
            pages.write(slot, head, key.data(), value.data());
        }
    for (size_t at = 0; at < table.size(); at++)
        for (auto* pool : {&keys, &values})
            std::copy_n(pool->data() + size_t(table[at]) * block_bytes, block_bytes, pool->data() + size_t(copies[at]) * block_bytes);
    for (auto& x : q) x = normal();
    auto run = [&](const std::vector<int32_t>& blocks, int64_t& items) {
        return attend(pages, blocks, width, window, starts, used, heads, q, threads, items);
    };
    int64_t together, apart;
    expect(run(table, together) == run(copies, apart), "shared blocks", 0);
    int64_t in_lots;
    auto lot_by_lot = attend(pages, table, width, window, starts, used, heads, q, threads, in_lots, {}, 2);
    expect(lot_by_lot == run(copies, apart), "shared blocks in lots", 0);
    expect((together < apart) == shares, "items of shared blocks", double(together));
}

// Passes of lots in threads' order: nobody begins one before all that its tokens see went through the pass before, even
// where a row behind fills blocks that one before it reads.
static void check_lots(int threads, int64_t count) {
    const int64_t p = 4, width = 30, passes = 40;
    std::vector<int32_t> starts{0, 30, 31, 71, 111}, used{30, 50, 60, 60}, table(size_t(4 * width));
    for (size_t i = 0; i < table.size(); i++) table[i] = int32_t(i + 1);
    // Rows 1 and 2 see 20 tokens before their own: row 1 what row 3 fills, row 2 what row 0 does.
    for (int64_t i = 0; i < 5; i++) {
        table[size_t(width + i)] = table[size_t(3 * width + 5 + i)];
        table[size_t(2 * width + i)] = table[size_t(i)];
    }
    Written written(table, width, 0, p, starts, used);
    FolioStep step{};
    step.num_tokens = starts.back(), step.num_rows = 4, step.starts = starts.data(), step.used = used.data();
    step.block_size = p, step.groups = &written.group;
    Lots lots;
    for (int round = 0; round < 2; round++) {  // memory is taken again
        lots.make(step, 1, count, 3);
        bool whole = lots.begin(0) == 0 && lots.end(lots.count() - 1) == step.num_tokens && lots.count() <= count;
        for (int64_t lot = 0; lot < lots.count(); lot++)
            for (int64_t token = lots.begin(lot); token < lots.end(lot); token++) whole = whole && lots.of(token) == lot;
        expect(whole, "cuts of lots", double(count));
        std::vector<std::atomic<int64_t>> done(static_cast<size_t>(lots.count()));
        std::atomic<int64_t> early{0};
        auto needs = [&](int64_t lot, int64_t token) {  // a token that tokens of a lot see
            for (int64_t own = lots.begin(lot); own < lots.end(lot); own++) {
                bool of_row_0 = own >= 31 && own < 71 && token < 20, of_row_3 = own == 30 && token >= 71 && token < 91;
                auto row = [&](int64_t t) { return std::upper_bound(starts.begin(), starts.end(), int32_t(t)); };
                if (of_row_0 || of_row_3 || (row(own) == row(token) && token <= own)) return true;
            }
            return false;
        };
        run_team(threads, [&](Team& team, int) {
            int64_t at, end;
            while (team.take(lots.count() * passes, 1, at, end)) {
                int64_t lot = at % lots.count(), pass = at / lots.count();
                lots.wait(lot, uint32_t(pass));
                for (int64_t token = 0; token < step.num_tokens; token++)
                    if (needs(lot, token) && done[size_t(lots.of(token))] < pass) early++;
                for (int64_t turn = (lot * 7 + pass * 3) % 11 * 1000; turn > 0; turn--) asm volatile("");
                done[size_t(lot)]++;
                lots.end_pass(lot);
            }
        });
        expect(early == 0, "passes that began early", double(early));
    }
}

int main() {
    for (int threads : {1, 2, 5})
        for (int64_t count : {1, 3, 8, 50}) check_lots(threads, count);
    for (int threads : {1, 2, 3})
        for (int64_t format = 0; format < FOLIO_FORMATS; format++)
            for (auto [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {17, 33}, {48, 80}, {9, 127}, {130, 256}})
                for (int64_t rows : {1, 3, 13}) check_linear({format}, n, k, rows, threads);
    for (int64_t other = 0; other < FOLIO_FORMATS; other++)
        for (int64_t rows : {1, 13}) check_linear({FOLIO_I8, other, FOLIO_Q8_0}, 17, 100, rows, 2);
    for (int64_t format : {FOLIO_Q4_0, FOLIO_Q4_1})
        for (int64_t rows : {1, 3, 13, 20, 50}) check_linear({format}, 40, 320, rows, 2, 300.0f);
    for (auto [n, k] : {std::pair<int64_t, int64_t>{1, 1}, {17, 33}, {48, 127}, {33, 128}, {49, 2200}})
        for (int64_t rows : {48, 61}) {
            check_linear({FOLIO_Q4_0}, n, k, rows, 2);
            check_linear({FOLIO_Q4_1, FOLIO_Q4_0}, n, k, rows, 3);
            check_linear({FOLIO_Q4_1, FOLIO_Q8_0}, n, k, rows, 1);
        }
    for (int64_t n : {1, 9, 4096, 9001}) check_likeliest(n, 3, 2);
    for (int64_t width : {1, 7, 64, 65, 200, 4097, 9001})
        for (Draw draw : {Draw{1, 0, 0, 1, 0}, {0.7, 0, 50, 1, 0}, {1.5, 0, 0, 0.9, 0}, {2, 0.05, 40, 0.8, 0}, {1, 0, 3000, 0.99, 0}})
            for (int64_t rows : {1, 5}) check_draws(width, rows, 2, draw);
    for (int64_t k : {1, 2, 7, 31, 64, 127, 200, 576}) check_rotation(k);
    for (int threads : {1, 3})
        for (int64_t format = 0; format < FOLIO_FORMATS; format++)
            for (int64_t stored : {int64_t(FOLIO_F32), int64_t(FOLIO_BF16)})
                for (int64_t rows : {1, 7, 110}) {
                    check_lora(format, stored, 48, 80, rows, {4, 16, 0}, threads);
                    check_lora(format, stored, 33, 65, rows, {1, 37, 20, 8}, threads);
                }
    for (int64_t format = 0; format < 3; format++) {
        check_attention(format, 6, 2, 8, 16, 0, 2);
        check_attention(format, 9, 3, 64, 16, 0, 2);
        check_attention(format, 4, 4, 80, 1, 12, 2);
        check_attention(format, 8, 1, 128, 5, 300, 3);
        check_attention(format, 6, 3, 32, 48, 50, 2);
        check_attention(format, 14, 2, 16, 12, 0, 2);
        check_attention(format, 2, 2, 6, 32, 0, 1);
    }
    for (int threads : {1, 2}) {
        check_shared(FOLIO_KV_I8, 16, 0, 6, true, threads);
        check_shared(FOLIO_KV_I8, 4, 0, 50, true, threads);
        check_shared(FOLIO_KV_I8, 16, 300, 6, false, threads);
        check_shared(FOLIO_KV_F32, 16, 0, 6, false, threads);
    }
    std::printf(failures ? "%d failed\n" : "all checks hold\n", failures);
    return failures ? 1 : 0;
}
