// SPDX-License-Identifier: Apache-2.0
#include "head_shares.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <mutex>
#include <utility>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cpu.hpp>
#include <reference_model/parallel.hpp>
#include <reference_model/run.hpp>

namespace kvpolicy::tools {
namespace {

using Cache = cpu::KvCache<bfloat16>;
using Plan = HeadPlan<bfloat16>;

// Sums over the later tokens of one text, for one head.
struct Sums {
  double error = 0;   // squared differences of outputs
  double output = 0;  // squares of full attention's
  double lost = 0;
  double rows_read = 0;
  double unread = 0;
  std::size_t queries = 0;  // tokens times query heads
  std::size_t tokens = 0;
};

// One setting's cache beside the full one.
struct Beside {
  Cache cache;
  bool in_halves = false;
  std::vector<Sums> sums;
  std::vector<float> out, log_sum_exp, unread;
  std::vector<std::size_t> rows_read;

  Beside(Cache made, const HeadRule& rule, std::size_t heads)
      : cache{std::move(made)}, in_halves{is_in_halves(rule.key_encoding)}, sums(heads) {}
};

struct HalvedRows {
  std::size_t halved = 0;
  std::size_t others = 0;
};
HalvedRows rows_of(const Cache& cache, std::size_t layer, std::size_t head) {
  HalvedRows rows;
  for (const Segment& segment : cache.segments(layer, head)) {
    (is_in_halves(segment.keys.format.encoding) ? rows.halved : rows.others) += segment.rows;
  }
  return rows;
}

// One text, read under full attention; all settings attend to the same queries beside it.
class SharedText {
 public:
  SharedText(const TextModel& model, std::span<const HeadSettings<bfloat16>> settings,
             const SharesConfig& config)
      : model_{model.llama()}, config_{config}, shape_{model.config().shape()} {
    for (const HeadSettings<bfloat16>& one : settings) {
      Plan plan{shape_, one};
      reference::limit_windows(plan, model.config());
      for (std::size_t layer = 0; layer < shape_.layers; ++layer) {
        queries_ = std::max(queries_, plan.observed_queries(layer));
      }
      plans_.push_back(std::move(plan));
    }
  }

  // Returns sums[setting][head]. `done` is called after each later token.
  [[nodiscard]] std::vector<std::vector<Sums>> read(const SplitText& text,
                                                    const std::function<void()>& done) const {
    Plan full{shape_};
    reference::limit_windows(full, model_.config());
    Cache base{std::move(full), CacheOptions{.kept_queries = queries_}};
    static_cast<void>(reference::prefill(model_, base, text.context, 512));
    std::vector<Beside> beside;
    for (const Plan& plan : plans_) {
      const HeadRule rule = plan.at(0, 0).rule(shape_.head_dim);
      beside.emplace_back(base.fork_as(plan), rule, shape_.kv_head_count());
      if (rule.compresses) beside.back().cache.compress();
    }
    for (const int token : text.later) {
      follow(base, beside, token);
      done();
    }
    std::vector<std::vector<Sums>> sums;
    for (Beside& one : beside) sums.push_back(std::move(one.sums));
    return sums;
  }

 private:
  void follow(Cache& base, std::vector<Beside>& beside, int token) const {
    std::vector<float> log_sum_exp(shape_.q_heads);
    const auto attend = [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                            TensorView<const float> v, TensorView<float> out) {
      reference::step_layer(base, layer, q, k, v, out, {.log_sum_exp = log_sum_exp});
      for (Beside& one : beside) attend_beside(one, layer, q, k, v, out, log_sum_exp);
    };
    static_cast<void>(model_.forward(std::array{token}, base.tokens(), attend, reference::LogitsOf::none));
  }

  void attend_beside(Beside& one, std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                     TensorView<const float> v, TensorView<float> full,
                     std::span<const float> full_log_sum_exp) const {
    const std::size_t heads = k.heads;
    const std::size_t group = q.heads / heads;
    one.out.resize(q.heads * full.head_dim);
    one.log_sum_exp.resize(q.heads);
    AttendOptions options{.log_sum_exp = one.log_sum_exp};
    std::vector<HalvedRows> rows;
    if (one.in_halves) {
      for (std::size_t head = 0; head < heads; ++head) rows.push_back(rows_of(one.cache, layer, head));
      one.unread.assign(q.heads, 0.0F);
      one.rows_read.assign(heads, 0);
      options.read = Read::bounded;
      options.bound = {.epsilon = config_.epsilon, .unread = one.unread, .rows_read = one.rows_read};
    }
    const TensorView<float> out{one.out.data(), 1, q.heads, full.head_dim};
    reference::step_layer(one.cache, layer, q, k, v, out, options);
    for (std::size_t head = 0; head < heads; ++head) {
      Sums& sums = one.sums[layer * heads + head];
      for (std::size_t i = head * group; i < (head + 1) * group; ++i) {
        for (std::size_t channel = 0; channel < full.head_dim; ++channel) {
          const auto exact = static_cast<double>(full.row(0, i)[channel]);
          const double difference = static_cast<double>(out.row(0, i)[channel]) - exact;
          sums.error += difference * difference;
          sums.output += exact * exact;
        }
        // The rows that were dropped have what the sum of the weights lacks.
        const double kept =
            std::exp(static_cast<double>(one.log_sum_exp[i]) - static_cast<double>(full_log_sum_exp[i]));
        sums.lost += std::clamp(1.0 - kept, 0.0, 1.0);
        if (one.in_halves) sums.unread += static_cast<double>(one.unread[i]);
        ++sums.queries;
      }
      if (one.in_halves) {
        require(rows[head].halved > 0, "a text of ", one.cache.tokens(),
                " tokens is too short: no row of it is in halves yet; take longer texts");
        // The call's own row is read as it came, besides those that the cache held.
        const std::size_t in_full = one.rows_read[head] - rows[head].others - 1;
        sums.rows_read += static_cast<double>(in_full) / static_cast<double>(rows[head].halved);
      }
      ++sums.tokens;
    }
  }

  const reference::Llama& model_;
  SharesConfig config_;
  ModelShape shape_;
  std::vector<Plan> plans_;
  std::size_t queries_ = 0;  // the most by which any setting ranks rows
};

double per(double sum, std::size_t count) { return sum / static_cast<double>(count); }

void add_samples(SettingShares& found, std::span<const Sums> heads, const HeadRule& rule) {
  const bool drops = !rule.keeps_every_row() && !rule.is_quantized();
  for (std::size_t i = 0; i < heads.size(); ++i) {
    const Sums& sums = heads[i];
    // A head whose output is 0 has no error but one that comes from nothing.
    found.error.values()[i].push_back(sums.output > 0 ? sums.error / sums.output : sums.error);
    if (drops) found.lost.values()[i].push_back(per(sums.lost, sums.queries));
    if (!is_in_halves(rule.key_encoding)) continue;
    found.rows_read.values()[i].push_back(per(sums.rows_read, sums.tokens));
    found.unread.values()[i].push_back(per(sums.unread, sums.queries));
  }
}

}  // namespace

std::vector<SettingShares> measure_shares(const TextModel& model,
                                          std::span<const HeadSettings<bfloat16>> settings,
                                          std::span<const SplitText> texts, const SharesConfig& config,
                                          const SharesReport& report) {
  require(!texts.empty(), "measure_shares: there are no texts to measure heads by");
  std::size_t total = 0;
  for (const SplitText& text : texts) {
    require(!text.context.empty() && !text.later.empty(), "measure_shares: a text has ", text.context.size(),
            " tokens and ", text.later.size(), " that come later, must have at least one of each");
    total += text.later.size();
  }
  const ModelShape shape = model.config().shape();
  std::vector<SettingShares> found;
  for (const HeadSettings<bfloat16>& one : settings) {
    const HeadRule rule = one.rule(shape.head_dim);
    require(!rule.adaptive_in_layer && !rule.waits_for_scoring,
            "measure_shares: a head is measured by itself, but the rows of setting ", found.size(),
            rule.waits_for_scoring ? " wait for a scoring pass" : " compete with those of other heads");
    const SampledShares none{shape.layers, shape.kv_heads};
    found.push_back({none, none, none, none});
  }
  const SharedText shared{model, settings, config};
  std::mutex reporting;
  std::size_t done = 0;
  std::vector<std::vector<std::vector<Sums>>> sums(texts.size());  // [texts][settings][heads]
  reference::for_each_block(texts.size(), 1, true, [&](std::size_t i, std::size_t) {
    sums[i] = shared.read(texts[i], [&] {
      const std::lock_guard lock{reporting};
      ++done;
      if (report) report(static_cast<double>(done) / static_cast<double>(total));
    });
  });
  for (const auto& of_text : sums) {
    for (std::size_t i = 0; i < of_text.size(); ++i) {
      add_samples(found[i], of_text[i], settings[i].rule(shape.head_dim));
    }
  }
  return found;
}

HeadTable<double> mean_of(const SampledShares& samples) {
  HeadTable<double> means{samples.layers(), samples.heads()};
  for (std::size_t i = 0; i < means.values().size(); ++i) {
    double sum = 0;
    for (const double sample : samples.values()[i]) sum += sample;
    means.values()[i] = sum / static_cast<double>(samples.values()[i].size());
  }
  return means;
}

}  // namespace kvpolicy::tools
