// SPDX-License-Identifier: Apache-2.0
//
// Compares what visualize records with what each policy's definition says about the rows, and with the
// softmax in double of the attention that they get.
#include <visualize/recording.hpp>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <set>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/plan/low_bits.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>
#include <model/dense_attention.hpp>

#include "byte_model.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

using Plan = HeadPlan<bfloat16>;
using Rows = std::set<std::size_t>;
using Dense = DenseStorage<bfloat16>;

constexpr std::size_t prompt_tokens = 200;

const TextModel& model() {
  static const TextModel made = random_text_model();
  return made;
}

std::vector<int> prompt() {
  std::vector<int> tokens;
  std::uint32_t bits = 9;
  for (std::size_t i = 0; i < prompt_tokens; ++i) {
    bits = bits * 1664525U + 1013904223U;
    tokens.push_back(static_cast<int>(bits >> 24));
  }
  return tokens;
}

Recording record_all(const HeadSettings<bfloat16>& settings, std::size_t steps = 16) {
  return record(model(), Plan{model().config().shape(), settings}, prompt(),
                {.prompt_steps = steps, .most_new = 9, .least_attention = 0.0F});
}

Rows rows_of_runs(const RowRuns& runs) {
  Rows rows;
  std::size_t before = 0;
  bool first = true;
  for (const RowRun& run : runs) {
    CHECK(run.rows > 0);
    CHECK((first || run.first > before));  // ascending, and not adjacent
    for (std::size_t i = 0; i < run.rows; ++i) rows.insert(run.first + i);
    before = run.first + run.rows;
    first = false;
  }
  return rows;
}

Rows all_rows(std::size_t end) {
  Rows rows;
  for (std::size_t row = 0; row < end; ++row) rows.insert(rows.end(), row);
  return rows;
}

template <class Check>
void for_each_step(const Recording& recording, Check check) {
  for (std::size_t step = 0; step < recording.steps.size(); ++step) {
    for (std::size_t head = 0; head < recording.steps[step].heads.size(); ++head) {
      CAPTURE(step);
      CAPTURE(head);
      const Step& own = recording.steps[step];
      const Rows before = step == 0 ? Rows{} : rows_of_runs(recording.steps[step - 1].heads[head].kept);
      check(own, own.heads[head], before);
    }
  }
}

// Layer 0 has the same queries and keys under every plan.
struct FirstLayer {
  std::vector<float> queries, keys;  // [tokens, heads, head_dim]

  explicit FirstLayer(std::span<const int> tokens) {
    reference::DenseCache cache{model().config()};
    const reference::AttendFn dense = cache.attend();
    static_cast<void>(model().llama().forward(
        tokens, 0,
        [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
            TensorView<const float> v, TensorView<float> out) {
          if (layer == 0) {
            queries.assign(q.data, q.data + q.tokens * q.heads * q.head_dim);
            keys.assign(k.data, k.data + k.tokens * k.heads * k.head_dim);
          }
          dense(layer, q, k, v, out);
        },
        LogitsOf::none));
  }
};

// Rounds to the nearest bfloat16, as rows are kept.
double rounded(float x) {
  const auto bits = std::bit_cast<std::uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7FFFU + (bits >> 16 & 1U)) & 0xFFFF0000U);
}

// The attention of the last of `tokens` tokens over the rows `read`; rows from `fresh` on are not
// rounded.
std::vector<double> attention_over(const FirstLayer& layer, std::size_t head, std::size_t tokens,
                                   std::size_t fresh, const Rows& read) {
  const ModelShape shape = model().config().shape();
  std::vector<double> mean(read.size());
  for (std::size_t member = 0; member < shape.queries_per_kv(); ++member) {
    const float* query =
        layer.queries.data() +
        ((tokens - 1) * shape.q_heads + head * shape.queries_per_kv() + member) * shape.head_dim;
    std::vector<double> weights;
    for (const std::size_t row : read) {
      const float* key = layer.keys.data() + (row * shape.kv_heads + head) * shape.head_dim;
      double dot = 0;
      for (std::size_t i = 0; i < shape.head_dim; ++i) {
        const double channel = row < fresh ? rounded(key[i]) : static_cast<double>(key[i]);
        dot += static_cast<double>(query[i]) * channel;
      }
      weights.push_back(dot / std::sqrt(static_cast<double>(shape.head_dim)));
    }
    const double most = *std::ranges::max_element(weights);
    double sum = 0;
    for (double& weight : weights) sum += weight = std::exp(weight - most);
    for (std::size_t i = 0; i < weights.size(); ++i) {
      mean[i] += weights[i] / sum / static_cast<double>(shape.queries_per_kv());
    }
  }
  return mean;
}

// How far 8 bits with a scale for `group` rows of a channel, from row `first` on, can move a logit of the last of
// `tokens` tokens: half a step in each channel.
double logit_width(const FirstLayer& layer, std::size_t head, std::size_t tokens, std::size_t first,
                   std::size_t group) {
  const ModelShape shape = model().config().shape();
  double widest = 0;
  for (std::size_t member = 0; member < shape.queries_per_kv(); ++member) {
    const float* query =
        layer.queries.data() +
        ((tokens - 1) * shape.q_heads + head * shape.queries_per_kv() + member) * shape.head_dim;
    for (std::size_t begin = first; begin + group <= tokens; begin += group) {
      double width = 0;
      for (std::size_t c = 0; c < shape.head_dim; ++c) {
        double least = INFINITY, largest = -INFINITY;
        for (std::size_t row = begin; row < begin + group; ++row) {
          const double x = rounded(layer.keys[(row * shape.kv_heads + head) * shape.head_dim + c]);
          least = std::min(least, x);
          largest = std::max(largest, x);
        }
        // Scale and zero are halves, so a step may be wider by a thousandth of what it covers and of the zero.
        const double step = (largest - least) / 255 + (largest - least + std::abs(least)) * 0x1p-10 / 255;
        width += std::abs(static_cast<double>(query[c])) * step / 2;
      }
      widest = std::max(widest, width / std::sqrt(static_cast<double>(shape.head_dim)));
    }
  }
  return widest;
}

void check_attention(const Recording& recording) {
  const FirstLayer layer{recording.tokens};
  std::size_t before = 0;
  for (const Step& step : recording.steps) {
    for (std::size_t head = 0; head < recording.heads.shape().kv_heads; ++head) {
      CAPTURE(step.tokens);
      CAPTURE(head);
      const HeadStep& own = step.heads[head];
      if (step.kind == StepKind::compress) {
        CHECK(own.attention.empty());
        CHECK(own.read.empty());
        continue;
      }
      const Rows read = rows_of_runs(own.read);
      const auto expected = attention_over(layer, head, step.tokens, before, read);
      REQUIRE(own.attention.size() == read.size());
      std::size_t at = 0;
      double worst = 0;
      double sum = 0;
      for (const std::size_t row : read) {
        CHECK(own.attention[at].row == row);
        const double share = static_cast<double>(own.attention[at].share);
        const double error = std::abs(share - expected[at++]);
        worst = error <= worst ? worst : error;  // NaN stays
        sum += share;
      }
      CHECK(worst <= 2e-4);
      CHECK(std::abs(sum - 1) <= 1e-4);
    }
    before = step.tokens;
  }
}

}  // namespace

TEST_CASE("a recording has a step for each part of the prompt and each new token") {
  const Recording recording = record_all(FullCache<Dense>::Config{});
  CHECK(recording.prompt_tokens == prompt_tokens);
  CHECK(recording.tokens.size() == prompt_tokens + 9);
  CHECK(recording.texts.size() == recording.tokens.size());
  CHECK(recording.piece == 13);
  REQUIRE(recording.steps.size() == 16 + 9);
  CHECK(recording.steps[0].tokens == 13);
  CHECK(recording.steps[15].tokens == prompt_tokens);
  CHECK(recording.steps[15].kind == StepKind::prompt);
  CHECK(recording.steps[16].tokens == prompt_tokens + 1);
  CHECK(recording.steps[16].kind == StepKind::generate);
}

TEST_CASE("a full head keeps and reads every row") {
  const Recording recording = record_all(FullCache<Dense>::Config{});
  for_each_step(recording, [](const Step& step, const HeadStep& head, const Rows& before) {
    CHECK(rows_of_runs(head.kept) == all_rows(step.tokens));
    CHECK(rows_of_runs(head.exact) == all_rows(step.tokens));
    CHECK(rows_of_runs(head.read) == all_rows(step.tokens));
    CHECK(head.bytes_read == before.size() * 2 * 64 * 2);
    CHECK(head.bytes == step.full_head_bytes);
    CHECK(head.bytes == (step.tokens + 63) / 64 * 64 * 2 * 64 * 2);
  });
  for (const Step& step : recording.steps) CHECK(step.bytes >= recording.full_bytes(step));
  check_attention(recording);
}

TEST_CASE("a window reads what it keeps: sinks and the latest rows, including the query's own") {
  const Recording recording = record_all(SinkRecentCache<Dense>::Config{.sinks = 4, .recent = 20});
  for_each_step(recording, [](const Step& step, const HeadStep& head, const Rows&) {
    Rows expected;
    for (std::size_t row = 0; row < step.tokens; ++row) {
      if (row < 4 || row + 20 >= step.tokens) expected.insert(row);
    }
    CHECK(rows_of_runs(head.kept) == expected);
    CHECK(rows_of_runs(head.read) == expected);
  });
  check_attention(recording);
}

TEST_CASE("quantised rows: the latest are exact, all are read, at fewer bytes") {
  QuantizedResidualCache<bfloat16, Granularity::per_token>::Config config;
  config.storage.bits = 4;
  config.storage.key_group = 32;
  config.storage.value_group = 32;
  config.storage.residual = 32;
  for_each_step(record_all(config), [](const Step& step, const HeadStep& head, const Rows& before) {
    CHECK(rows_of_runs(head.kept) == all_rows(step.tokens));
    CHECK(rows_of_runs(head.read) == all_rows(step.tokens));
    const std::size_t coarse = step.tokens - std::min<std::size_t>(step.tokens, 32);
    Rows exact;
    for (std::size_t row = coarse; row < step.tokens; ++row) exact.insert(row);
    CHECK(rows_of_runs(head.exact) == exact);
    // The call found those rows exact that were exact when it began, and its own rows are not read from
    // the cache. A row in 4 bits has 32 bytes per side, and 2 groups with a scale and a zero of 2 bytes
    // each.
    const std::size_t found_coarse = before.size() - std::min<std::size_t>(before.size(), 32);
    CHECK(head.bytes_read == found_coarse * 2 * (32 + 2 * 4) + (before.size() - found_coarse) * 2 * 64 * 2);
  });
}

TEST_CASE("a budget keeps everything until a compression is requested, and then also later rows") {
  const Recording recording = record_all(
      HeadBudgetCache<Dense>::Config{.budget = 24, .scorer = {.observation_window = 8, .kernel = 3}});
  REQUIRE(recording.steps.size() == 16 + 1 + 9);
  CHECK(recording.steps[16].kind == StepKind::compress);
  CHECK(recording.steps[16].tokens == prompt_tokens);
  for_each_step(recording, [](const Step& step, const HeadStep& head, const Rows& before) {
    const Rows kept = rows_of_runs(head.kept);
    if (step.kind == StepKind::prompt) {
      CHECK(kept == all_rows(step.tokens));
      CHECK(rows_of_runs(head.read) == kept);
    } else if (step.kind == StepKind::compress) {
      CHECK(kept.size() == 24 + 8);
      for (std::size_t row = prompt_tokens - 8; row < prompt_tokens; ++row) {
        CHECK(kept.contains(row));
      }
      CHECK(head.bytes_read == 0);
    } else {
      Rows expected = before;
      expected.insert(step.tokens - 1);
      CHECK(kept == expected);
      CHECK(rows_of_runs(head.read) == expected);
    }
  });
  check_attention(recording);
}

TEST_CASE("a head that compresses at each token reads the row that it then drops") {
  const Recording recording = record_all(HeadBudgetCache<Dense, TovaScorer>::Config{
      .budget = 16, .compress_every = 1, .after_first_compress = true});
  for_each_step(recording, [](const Step& step, const HeadStep& head, const Rows& before) {
    if (step.kind != StepKind::generate) return;
    Rows expected = before;
    expected.insert(step.tokens - 1);
    CHECK(rows_of_runs(head.read) == expected);
    const Rows kept = rows_of_runs(head.kept);
    CHECK(kept.size() == 16);
    CHECK(std::ranges::includes(expected, kept));
  });
  check_attention(recording);
}

TEST_CASE("a head that selects keeps everything, and reads whole chunks and the rows after them") {
  const Recording recording = record_all(ChunkRetrievalCache<Dense>::Config{.chunk = 8, .budget = 32});
  for_each_step(recording, [](const Step& step, const HeadStep& head, const Rows& before) {
    CHECK(rows_of_runs(head.kept) == all_rows(step.tokens));
    const Rows read = rows_of_runs(head.read);
    if (step.kind == StepKind::prompt) {
      CHECK(read == all_rows(step.tokens));
      return;
    }
    const std::size_t chunks_end = before.size() / 8 * 8;
    std::size_t chosen = 0;
    for (std::size_t chunk = 0; chunk < chunks_end; chunk += 8) {
      std::size_t rows = 0;
      for (std::size_t row = chunk; row < chunk + 8; ++row) rows += read.contains(row) ? 1 : 0;
      CHECK((rows == 0 || rows == 8));
      chosen += rows;
    }
    CHECK(chosen == 32);
    CHECK(read.contains(0));  // the sinks are always among them
    for (std::size_t row = chunks_end; row < step.tokens; ++row) CHECK(read.contains(row));
  });
  check_attention(recording);
}

TEST_CASE("a recording leaves out small shares of attention, and ends as requested") {
  const RecordSettings settings{.prompt_steps = 1, .most_new = 9, .least_attention = 0.02F};
  const Plan plan{model().config().shape(), FullCache<Dense>::Config{}};
  const Recording recording = record(model(), plan, prompt(), settings);
  REQUIRE(recording.steps.size() == 10);
  for_each_step(recording, [](const Step&, const HeadStep& head, const Rows&) {
    CHECK(!head.attention.empty());
    for (const RowAttention& row : head.attention) CHECK(row.share >= 0.02F);
  });
  RecordSettings stopped = settings;
  const std::span<const int> tokens{recording.tokens};
  stopped.stop = model().decode(tokens.subspan(prompt_tokens + 2, 2));
  const Recording shorter = record(model(), plan, prompt(), stopped);
  CHECK(shorter.tokens.size() <= prompt_tokens + 4);
  CHECK(shorter.tokens.size() > prompt_tokens);
  CHECK(shorter.steps.back().tokens == shorter.tokens.size());
  CHECK_THROWS_AS(static_cast<void>(record(model(), plan, {}, settings)), ShapeError);
  CHECK_THROWS_AS(static_cast<void>(record(model(), plan, prompt(), {.prompt_steps = 0})), ConfigError);
}

TEST_CASE("a read with a bound: what stays unread holds no more than the bound, and that is measured") {
  const ModelShape shape = model().config().shape();
  const LowBitFormat format = LowBitFormat::of_bounded(shape, 8, 16);  // and 4 first rows are exact
  for (const float epsilon : {0.0F, 0.1F, 0.5F}) {
    CAPTURE(epsilon);
    RecordSettings settings{.prompt_steps = 16,
                            .most_new = 9,
                            .least_attention = 0.0F,
                            .reading = Reading{.read = Read::bounded, .epsilon = epsilon}};
    const Recording recording = record(model(), Plan{shape, format.head<bfloat16>()}, prompt(), settings);
    const FirstLayer layer{recording.tokens};
    std::size_t left = 0;
    for_each_step(recording, [&](const Step& step, const HeadStep& head, const Rows& before) {
      CHECK(rows_of_runs(head.kept) == all_rows(step.tokens));
      const Rows read = rows_of_runs(head.read);
      if (step.kind == StepKind::prompt) {
        CHECK(!head.unread);
        CHECK(read == all_rows(step.tokens));
        return;
      }
      REQUIRE(head.unread);
      left += step.tokens - read.size();
      double missed = 0, sum = 0;
      REQUIRE(head.attention.size() == step.tokens);
      for (const RowAttention& row : head.attention) {
        sum += static_cast<double>(row.share);
        if (!read.contains(row.row)) missed += static_cast<double>(row.share);
      }
      CHECK(std::abs(sum - 1) <= 1e-4);
      CHECK(std::abs(static_cast<double>(head.unread->measured) - missed) <= 1e-4);
      CHECK(head.unread->bound >= head.unread->measured);
      CHECK(head.unread->bound <= epsilon + 1e-6F);
      // From row 4 on, values are quantised one by one and keys 64 at a time, because these share scales.
      const std::size_t values = before.size() - 4 - 16;
      const std::size_t quantised = values / 64 * 64;
      std::size_t in_full = 0;
      for (const std::size_t row : read) in_full += row >= 4 && row < 4 + quantised ? 1 : 0;
      for (std::size_t row = 0; row < step.tokens; ++row) {
        if (row < 4 || row >= 4 + quantised) CHECK(read.contains(row));
      }
      // A row has 64 codes of 8 bits on each side; a key's scale and zero are shared by 64 rows, a value's by 64
      // channels. An upper half is read with its key's scales.
      const std::size_t upper = 64 / 2 + 64 * 4 / 64, key = 64 + 64 * 4 / 64, value = 64 + 4;
      const std::size_t others =
          (2 * before.size() - quantised - values) * 64 * 2 + (values - quantised) * value;
      CHECK(head.bytes_read == others + in_full * (key + value) + (epsilon > 0.0F ? quantised * upper : 0));
    });
    CHECK((epsilon == 0.0F ? left == 0 : left > 0));
    for (const Step& step : recording.steps) {
      if (step.kind == StepKind::prompt) continue;
      for (std::size_t head = 0; head < shape.kv_heads; ++head) {
        const Rows all = all_rows(step.tokens);
        const auto expected = attention_over(layer, head, step.tokens, step.tokens - 1, all);
        const double width = logit_width(layer, head, step.tokens, 4, 64);
        double worst = 0;  // of what the rounding of keys to 8 bits may change
        for (const std::size_t row : all) {
          const double error =
              std::abs(static_cast<double>(step.heads[head].attention[row].share) - expected[row]);
          const double relative = error / (expected[row] * std::expm1(2 * width) + 1e-4);
          worst = relative <= worst ? worst : relative;  // NaN stays
        }
        CHECK(worst <= 1);
      }
    }
    // Small shares that are left out of the record count all the same.
    settings.least_attention = 0.02F;
    const Recording shorter = record(model(), Plan{shape, format.head<bfloat16>()}, prompt(), settings);
    REQUIRE(shorter.steps.size() == recording.steps.size());
    for_each_step(shorter, [&](const Step&, const HeadStep& head, const Rows&) {
      for (const RowAttention& row : head.attention) CHECK(row.share >= 0.02F);
    });
    for (std::size_t step = 0; step < recording.steps.size(); ++step) {
      for (std::size_t head = 0; head < recording.steps[step].heads.size(); ++head) {
        const auto& one = recording.steps[step].heads[head].unread;
        const auto& other = shorter.steps[step].heads[head].unread;
        REQUIRE(one.has_value() == other.has_value());
        if (one) CHECK(one->measured == other->measured);
      }
    }
  }
}
