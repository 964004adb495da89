// The compiled kernels through their door, beside plain loops in double: a program that needs neither Python nor torch, so
// that it runs where only the kernels do (an emulated processor). A line for each kind of check; 0 if all held.
//
// What is claimed to be exact is compared bit for bit.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "checking.h"
#include "kernels.h"

using namespace kaiten;
using namespace checking;

extern "C" {
const char* kaiten_refusal();
const char* kaiten_instructions();
int kaiten_paged_attention(const Attention*, int);
int kaiten_rms_norm(const Norm*, int);
int kaiten_gate_mul(const Gate*, int);
int kaiten_rope(const Rope*, int);
int kaiten_write_kv(const WriteKv*, int);
int64_t kaiten_packed_rows(int64_t);
int kaiten_has_linear(int, int64_t);
int kaiten_pack_linear(const Pack*, int);
int kaiten_pack_int8(const Pack*, int);
int64_t kaiten_packed_int4_bytes(int64_t, int64_t);
int kaiten_pack_int4(const PackInt4*, int);
int kaiten_unpack_rows(const Unpack*, int);
int kaiten_linear(const Linear*, int);
int kaiten_sample(const Sample*, int);
int kaiten_mask_logits(const Mask*, int);
void kaiten_noise_bits(int64_t, int64_t, int64_t, int64_t, int64_t*);
}

namespace {

enum class Kept { kPlain, kInt8, kInt4 };

// A weight as it is kept, and as numbers.
template <class T>
struct Matrix {
  int64_t out, in;
  Kept kept;
  std::vector<double> numbers;
  std::vector<float> scales;
  Packed packed;

  Matrix(int64_t out, int64_t in, Kept kept)
      : out(out), in(in), kept(kept), numbers(out * in),
        packed(kept == Kept::kInt4 ? kaiten_packed_int4_bytes(out, in)
                                   : kaiten_packed_rows(out) * in * (kept == Kept::kInt8 ? 1 : sizeof(T))) {
    kept == Kept::kPlain ? pack_plain() : kept == Kept::kInt8 ? pack_int8() : pack_int4();
  }

  void pack_plain() {
    const auto weight = random_of<T>(out * in);
    for (int64_t i = 0; i < out * in; ++i) numbers[i] = wide(weight[i]);
    const Pack pack{weight.data(), packed.at, out, in, sizeof(T) == 2};
    kaiten_pack_linear(&pack, 2);
  }

  void pack_int8() {
    std::vector<int8_t> codes(out * in);
    scales = random_of<float>(out);
    for (int64_t i = 0; i < out * in; ++i) codes[i] = int8_t(127 * uniform()), numbers[i] = codes[i] * scales[i / in];
    const Pack pack{codes.data(), packed.at, out, in, sizeof(T) == 2};
    kaiten_pack_int8(&pack, 2);
  }

  void pack_int4() {
    const int64_t groups = in / 32;
    std::vector<uint8_t> codes(out * in / 2), zeros(out * groups);
    const auto steps = random_of<bf16>(out * groups);
    for (uint8_t& zero : zeros) zero = uint8_t(8 + 7.9 * uniform());
    for (int64_t i = 0; i < out * in; ++i) {
      const int code = int(8 + 7.99 * uniform());
      codes[i / 2] |= code << i % 2 * 4;
      numbers[i] = (code - zeros[i / 32]) * double(wide(steps[i / 32]));
    }
    const PackInt4 pack{codes.data(), steps.data(), zeros.data(), packed.at, out, in, sizeof(T) == 2};
    kaiten_pack_int4(&pack, 2);
  }

  std::vector<T> times(const T* x, int64_t rows, const T* bias, int threads) const {
    std::vector<T> y(rows * out);
    const Linear call{x,    packed.at, bias, kept == Kept::kInt8 ? scales.data() : nullptr, y.data(), rows, in,
                      out,  sizeof(T) == 2, kept == Kept::kInt4};
    kaiten_linear(&call, threads);
    return y;
  }
};

template <class T>
void check_rows(Check& check, const Matrix<T>& w, const std::vector<T>& x, int64_t rows, const T* bias) {
  const std::vector<T> y = w.times(x.data(), rows, bias, 3);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < w.out; ++n) {
      double sum = bias ? wide(bias[n]) : 0, size = std::abs(sum);
      for (int64_t k = 0; k < w.in; ++k) {
        const double product = wide(x[r * w.in + k]) * w.numbers[n * w.in + k];
        sum += product, size += std::abs(product);
      }
      // An int4 weight is rounded to bfloat16 where pairs are multiplied.
      const double rounded = w.kept == Kept::kInt4 && sizeof(T) == 2 ? kBf16Unit : 0;
      check.near(wide(y[r * w.out + n]), sum, size * ((w.in + 4) * kFloatUnit + rounded) + kUnit<T> * std::abs(sum));
    }
  // Alone, cut in two anywhere, by one thread: the same bits.
  for (int64_t r = 0; r < rows; ++r)
    check.same(w.times(x.data() + r * w.in, 1, bias, 1).data(), y.data() + r * w.out, w.out * sizeof(T));
  for (int64_t cut = 1; cut < std::min<int64_t>(rows, 9); ++cut) {
    check.same(w.times(x.data(), cut, bias, 1).data(), y.data(), cut * w.out * sizeof(T));
    check.same(w.times(x.data() + cut * w.in, rows - cut, bias, 2).data(), y.data() + cut * w.out,
               (rows - cut) * w.out * sizeof(T));
  }
}

template <class T>
void check_linears() {
  const struct { Kept kept; const char* name; } kinds[] = {
      {Kept::kPlain, ""}, {Kept::kInt8, " int8"}, {Kept::kInt4, " int4"}};
  for (const auto& kind : kinds) {
    Check check(std::string("linear ") + kName<T> + kind.name);
    check.holds(kaiten_has_linear(sizeof(T) == 2, 64));
    for (const auto& [out, in] : std::vector<std::pair<int64_t, int64_t>>{{7, 32}, {96, 64}, {200, 96}})
      for (const int64_t rows : {1, 2, 3, 4, 5, 9, 17}) {
        const Matrix<T> w(out, in, kind.kept);
        const auto x = random_of<T>(rows * in), bias = random_of<T>(out);
        check_rows(check, w, x, rows, rows % 2 ? bias.data() : nullptr);
      }
    const Matrix<T> w(50, 64, kind.kept);  // more rows than a part
    check_rows<T>(check, w, random_of<T>(200 * 64), 200, nullptr);
  }
}

template <class T>
void check_weights_read_back() {
  Check check(std::string("weights read back ") + kName<T>);
  for (const Kept kept : {Kept::kPlain, Kept::kInt8}) {
    const Matrix<T> w(61, 40, kept);
    const int64_t ids[] = {60, 0, 7};
    std::vector<T> rows(3 * w.in);
    const Unpack call{w.packed.at, ids, rows.data(), kept == Kept::kInt8 ? w.scales.data() : nullptr, 3, w.in, w.out,
                      sizeof(T) == 2};
    kaiten_unpack_rows(&call, 1);
    for (int64_t i = 0; i < 3 * w.in; ++i)
      check.near(wide(rows[i]), w.numbers[ids[i / w.in] * w.in + i % w.in],
                 kept == Kept::kInt8 ? kUnit<T> * std::abs(wide(rows[i])) : 0);
  }
}

struct Shape {
  int heads, kv_heads, head_dim, window;
  float softcap;
};

// Pages of several rows, blocks of which lie in any order.
template <class T>
struct Pool {
  static constexpr int kBlock = 16;
  Shape shape;
  int width, blocks;
  std::vector<T> k, v;
  std::vector<int32_t> tables;

  Pool(Shape shape, int rows, int context_max)
      : shape(shape), width((context_max + kBlock - 1) / kBlock), blocks(rows * width),
        k(random_of<T>(int64_t(blocks) * shape.kv_heads * kBlock * shape.head_dim)), v(random_of<T>(k.size())),
        tables(blocks) {
    for (int i = 0; i < blocks; ++i) tables[i] = i * 7 % blocks;
  }

  double at(const std::vector<T>& pages, int row, int position, int kv_head, int d) const {
    const int64_t block = tables[row * width + position / kBlock];
    return wide(pages[((block * shape.kv_heads + kv_head) * kBlock + position % kBlock) * shape.head_dim + d]);
  }

  // `q` of rows [first, first + counts.size()), dense. The code that the door answers is in `code`.
  std::vector<T> attend(const T* q, int first, std::vector<int> counts, std::vector<int32_t> contexts, int threads,
                        int* code = nullptr) const {
    std::vector<int32_t> starts{0};
    for (const int count : counts) starts.push_back(starts.back() + count);
    const int64_t token = int64_t(shape.heads) * shape.head_dim;
    std::vector<T> out(starts.back() * token);
    Attention a{};
    a.q = q, a.k_pages = k.data(), a.v_pages = v.data(), a.out = out.data();
    a.tables = tables.data() + first * width, a.query_starts = starts.data(), a.contexts = contexts.data();
    a.q_stride = token, a.table_stride = a.table_width = width, a.tokens = starts.back(), a.blocks = blocks;
    a.rows = int(counts.size()), a.heads = shape.heads, a.kv_heads = shape.kv_heads, a.head_dim = shape.head_dim;
    a.block_size = kBlock, a.window = shape.window, a.scale = scale(), a.softcap = shape.softcap;
    a.is_bf16 = sizeof(T) == 2;
    const int answer = kaiten_paged_attention(&a, threads);
    if (code) *code = answer;
    return out;
  }

  float scale() const { return 1.0f / std::sqrt(float(shape.head_dim)); }

  // One head of one query, the last of `context` positions.
  std::vector<double> known(const T* q, int row, int context, int head) const {
    const int kv_head = head / (shape.heads / shape.kv_heads);
    const int from = shape.window ? std::max(0, context - shape.window) : 0;
    std::vector<double> mixed(shape.head_dim), scores;
    for (int j = from; j < context; ++j) {
      double score = 0;
      for (int d = 0; d < shape.head_dim; ++d) score += wide(q[d]) * at(k, row, j, kv_head, d);
      score *= scale();
      scores.push_back(shape.softcap > 0 ? shape.softcap * std::tanh(score / shape.softcap) : score);
    }
    const double top = *std::max_element(scores.begin(), scores.end());
    double total = 0;
    for (int j = from; j < context; ++j) {
      const double weight = std::exp(scores[j - from] - top);
      total += weight;
      for (int d = 0; d < shape.head_dim; ++d) mixed[d] += weight * at(v, row, j, kv_head, d);
    }
    for (double& one : mixed) one /= total;
    return mixed;
  }
};

template <class T>
void check_attention(const char* name, Shape shape) {
  Check check(std::string("attention ") + kName<T> + name);
  const std::vector<int> counts{1, 40, 3, 1};
  const std::vector<int32_t> contexts{1100, 600, 3, 37};
  const Pool<T> pool(shape, 4, 1100);
  const int64_t token = int64_t(shape.heads) * shape.head_dim;
  const auto q = random_of<T>(45 * token, 4);
  const std::vector<T> out = pool.attend(q.data(), 0, counts, contexts, 3);
  // Values are at most 1, so that bounds are of 1: of the weights, and of what scores are off by, sums of 64 products at most.
  const double bound = kUnit<T> * 2 + 64 * kFloatUnit;
  for (int row = 0, i = 0; row < 4; ++row)
    for (int c = 0; c < counts[row]; ++c, ++i) {
      const int context = contexts[row] - counts[row] + c + 1;
      if (row == 1 && c % 13 != 0) continue;
      for (int h = 0; h < shape.heads; ++h) {
        const int64_t at = i * token + h * shape.head_dim;
        const auto known = pool.known(q.data() + at, row, context, h);
        for (int d = 0; d < shape.head_dim; ++d) check.near(wide(out[at + d]), known[d], bound);
      }
    }
  // Each query alone, as decode has it, and chunks cut anywhere: the same bits.
  for (int row = 0, i = 0; row < 4; i += counts[row++])
    for (int c = 0; c < counts[row]; ++c) {
      const int before = contexts[row] - counts[row];
      check.same(pool.attend(q.data() + (i + c) * token, row, {1}, {before + c + 1}, 1).data(),
                 out.data() + (i + c) * token, token * sizeof(T));
      if (c % 7 == 3)
        check.same(pool.attend(q.data() + i * token, row, {c}, {before + c}, 2).data(), out.data() + i * token,
                   c * token * sizeof(T));
    }
}

template <class T>
void check_norms() {
  Check check(std::string("rms_norm ") + kName<T>);
  for (const int64_t hidden : {1, 7, 64, 203}) {
    const int64_t rows = 3;
    const auto x = random_of<T>(rows * hidden), residual = random_of<T>(rows * hidden), weight = random_of<T>(hidden);
    std::vector<T> out(rows * hidden), total(rows * hidden), one(hidden), one_total(hidden);
    Norm n{x.data(), residual.data(), weight.data(), out.data(), total.data(), rows, 1, hidden, hidden, 0, hidden, 0,
           1e-6f, sizeof(T) == 2};
    kaiten_rms_norm(&n, 2);
    for (int64_t r = 0; r < rows; ++r) {
      double squares = 0;
      for (int64_t i = 0; i < hidden; ++i) squares += std::pow(wide(total[r * hidden + i]), 2);
      const double scale = 1 / std::sqrt(squares / hidden + 1e-6);
      for (int64_t i = r * hidden; i < (r + 1) * hidden; ++i) {
        const double sum = double(wide(x[i])) + wide(residual[i]), normed = wide(total[i]) * scale * wide(weight[i % hidden]);
        check.near(wide(total[i]), sum, kUnit<T> * std::abs(sum));
        check.near(wide(out[i]), normed, (kUnit<T> + (hidden + 8) * kFloatUnit) * std::abs(normed));
      }
      Norm alone = n;
      alone.x = x.data() + r * hidden, alone.residual = residual.data() + r * hidden, alone.rows = 1;
      alone.out = one.data(), alone.total = one_total.data();
      kaiten_rms_norm(&alone, 1);
      check.same(one.data(), out.data() + r * hidden, hidden * sizeof(T));
    }
  }
}

template <class T>
void check_gates() {
  for (const bool is_gelu : {false, true}) {
    Check check(std::string("gate_mul ") + (is_gelu ? "gelu " : "silu ") + kName<T>);
    for (const int64_t inner : {5, 64, 131}) {
      const auto x = random_of<T>(2 * 2 * inner, 100);
      std::vector<T> out(2 * inner);
      const Gate call{x.data(), out.data(), 2, inner, 2 * inner, sizeof(T) == 2, is_gelu};
      kaiten_gate_mul(&call, 2);
      for (int64_t i = 0; i < 2 * inner; ++i) {
        const double g = wide(x[i / inner * 2 * inner + i % inner]), up = wide(x[(i / inner * 2 + 1) * inner + i % inner]);
        const double inward = is_gelu ? 2 * std::sqrt(2 / M_PI) * (g + 0.044715 * g * g * g) : g;
        const double known = g / (1 + std::exp(-inward)) * up;
        // An exponent of 88 is off by as much in float32 as its size says, and below that all is nearly nothing.
        check.near(wide(out[i]), known, (kUnit<T> + (sizeof(T) == 2 ? 0x1p-9 : 600 * kFloatUnit)) * std::abs(known) + 1e-30);
      }
    }
  }
}

template <class T>
void check_rope_and_pages() {
  Check check(std::string("rope, write_kv ") + kName<T>);
  const int heads = 3, head_dim = 36, half = 18, tokens = 5;
  auto q = random_of<T>(tokens * heads * head_dim), k = random_of<T>(tokens * head_dim);
  const auto before = q;
  const auto cos_sin = random_of<float>(50 * 2 * half);
  const int64_t positions[] = {0, 49, 7, 7, 3}, slots[] = {6, -1, 0, 9, 15};
  const Rope call{q.data(), k.data(), positions, cos_sin.data(), tokens, heads * head_dim, head_dim, 50, heads, 1,
                  head_dim, half, sizeof(T) == 2};
  kaiten_rope(&call, 2);
  for (int t = 0; t < tokens; ++t)
    for (int h = 0; h < heads; ++h)
      for (int i = 0; i < half; ++i) {
        const int64_t at = (t * heads + h) * head_dim + i;
        const double c = cos_sin[positions[t] * 2 * half + i], s = cos_sin[positions[t] * 2 * half + half + i];
        const double a = wide(before[at]), b = wide(before[at + half]);
        check.near(wide(q[at]), a * c - b * s, kUnit<T> * 4);
        check.near(wide(q[at + half]), b * c + a * s, kUnit<T> * 4);
      }
  std::vector<T> pages(16 * head_dim), values(16 * head_dim);
  const int64_t bytes = head_dim * sizeof(T);
  const WriteKv write{reinterpret_cast<char*>(k.data()), reinterpret_cast<char*>(q.data()),
                      reinterpret_cast<char*>(pages.data()), reinterpret_cast<char*>(values.data()), slots, tokens, bytes,
                      heads * bytes, 8, 1, bytes, 16};
  kaiten_write_kv(&write, 1);
  for (int t = 0; t < tokens; ++t)
    if (slots[t] >= 0) {
      check.same(pages.data() + slots[t] * head_dim, k.data() + t * head_dim, bytes);
      check.same(values.data() + slots[t] * head_dim, q.data() + t * heads * head_dim, bytes);
    }
}

// Philox4x32-10, of a counter (quad, position, choice, 0).
void philox(uint32_t quad, uint32_t position, uint32_t choice, uint64_t seed, uint32_t* bits) {
  uint32_t a = quad, b = position, c = choice, d = 0, key0 = uint32_t(seed), key1 = uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round, key0 += 0x9E3779B9u, key1 += 0xBB67AE85u) {
    const uint64_t first = uint64_t(a) * 0xD2511F53u, second = uint64_t(c) * 0xCD9E8D57u;
    const uint32_t next_a = uint32_t(second >> 32) ^ b ^ key0, next_c = uint32_t(first >> 32) ^ d ^ key1;
    a = next_a, b = uint32_t(second), c = next_c, d = uint32_t(first);
  }
  bits[0] = a, bits[1] = b, bits[2] = c, bits[3] = d;
}

struct Ask {
  float temperature, top_p, min_p;
  int64_t top_k;
};

// Tempered logit + noise of each token that may be drawn, else -inf.
std::vector<double> noisy(const float* logits, int64_t vocab, const Ask& ask, int64_t seed, int64_t choice, int64_t position) {
  std::vector<double> tempered(vocab), found(vocab, -HUGE_VAL);
  for (int64_t i = 0; i < vocab; ++i) tempered[i] = logits[i] / ask.temperature;
  std::vector<double> ranked = tempered;
  std::sort(ranked.rbegin(), ranked.rend());
  size_t kept = ask.top_k > 0 ? std::min<size_t>(ask.top_k, vocab) : vocab;
  double whole = 0, above = 0;
  for (size_t i = 0; i < kept; ++i) whole += std::exp(ranked[i] - ranked[0]);
  size_t nucleus = 0;
  for (; nucleus < kept && (ask.top_p >= 1 || nucleus == 0 || above < ask.top_p * whole); ++nucleus)
    above += std::exp(ranked[nucleus] - ranked[0]);
  double bound = ranked[nucleus - 1];
  if (ask.min_p > 0) bound = std::max(bound, ranked[0] + std::log(ask.min_p));
  for (int64_t i = 0; i < vocab; ++i) {
    uint32_t bits[4];
    philox(uint32_t(i / 4), uint32_t(position), uint32_t(choice), uint64_t(seed), bits);
    const double u = std::min(bits[i % 4] * 0x1p-32 + 0x1p-33, 1 - 0x1p-24);
    if (tempered[i] >= bound - 1e-9) found[i] = tempered[i] - std::log(-std::log1p(-u));
  }
  return found;
}

void check_sampling() {
  Check bits("noise"), check("sample"), masked("mask_logits");
  const int64_t vocab = 1003, rows = 24;
  std::vector<int64_t> found(vocab);
  kaiten_noise_bits(0x123456789ABCDEF, 3, 77, vocab, found.data());
  for (int64_t i = 0; i < vocab; ++i) {
    uint32_t known[4];
    philox(uint32_t(i / 4), 77, 3, 0x123456789ABCDEF, known);
    bits.holds(found[i] == known[i % 4]);
  }
  auto logits = random_of<float>(rows * vocab, 8);
  const Ask asks[] = {{0, 1, 0, 0}, {1, 1, 0, 0}, {0.7f, 0.9f, 0, 0}, {1.3f, 1, 0.05f, 0}, {1, 1, 0, 5}, {2, 0.5f, 0.01f, 40}};
  std::vector<float> temperature, top_p, min_p;
  std::vector<int64_t> top_k, seed, choice, position, ids(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const Ask& ask = asks[r % 6];
    temperature.push_back(ask.temperature), top_p.push_back(ask.top_p), min_p.push_back(ask.min_p);
    top_k.push_back(ask.top_k), seed.push_back(r * 0x9E3779B97F4A7C15), choice.push_back(r), position.push_back(100 + r);
  }
  bool ok[rows];
  const Sample call{logits.data(), temperature.data(), top_p.data(), min_p.data(), top_k.data(), seed.data(), choice.data(),
                    position.data(), ids.data(), ok, rows, vocab, false};
  kaiten_sample(&call, 3);
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = logits.data() + r * vocab;
    check.holds(ok[r]);
    if (temperature[r] == 0) {
      check.holds(ids[r] == std::max_element(row, row + vocab) - row);
      continue;
    }
    const auto of = noisy(row, vocab, asks[r % 6], seed[r], choice[r], position[r]);
    // What float32 says of two tokens that are as good as each other is its own affair.
    check.near(of[ids[r]], *std::max_element(of.begin(), of.end()), 1e-3);
  }
  logits[2 * vocab + 7] = NAN;
  kaiten_sample(&call, 1);
  check.holds(!ok[2] && ok[1] && ok[3]);
  std::vector<uint32_t> allowed((vocab + 31) / 32, 0xF0F0F0F0u);
  const int64_t of[] = {4};
  const Mask mask{logits.data(), of, allowed.data(), 1, int64_t(allowed.size()), rows, vocab};
  kaiten_mask_logits(&mask, 1);
  for (int64_t i = 0; i < vocab; ++i) masked.holds(std::isinf(logits[4 * vocab + i]) == (i % 8 < 4));
}

void check_refusals() {
  Check check("refusals");
  Pool<float> pool({2, 1, 16, 0, 0}, 1, 40);
  const auto q = random_of<float>(2 * 16);
  int code = 0;
  pool.attend(q.data(), 0, {1}, {40}, 1, &code);
  check.holds(code == 0);
  pool.tables[1] = 99;
  pool.attend(q.data(), 0, {1}, {40}, 1, &code);
  check.holds(code == 1 && std::strstr(kaiten_refusal(), "block_tables"));
}

template <class T>
void check_all() {
  check_linears<T>();
  check_weights_read_back<T>();
  check_attention<T>("", {4, 2, 64, 0, 0});
  check_attention<T>(" odd heads", {6, 2, 20, 0, 0});
  check_attention<T>(" window, softcap", {2, 1, 40, 100, 5});
  check_norms<T>();
  check_gates<T>();
  check_rope_and_pages<T>();
}

}  // namespace

int main() {
  check_all<float>();
  check_all<bf16>();
  check_sampling();
  check_refusals();
  return summary(kaiten_instructions());
}
