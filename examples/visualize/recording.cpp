// SPDX-License-Identifier: Apache-2.0
#include "recording.hpp"

#include <algorithm>
#include <array>
#include <utility>
#include <variant>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cpu.hpp>
#include <reference_model/run.hpp>
#include <reference_model/sampler.hpp>

#include "../tool_plan.hpp"
#include "watching_engine.hpp"

namespace kvpolicy::tools {
namespace {

using Plan = HeadPlan<bfloat16>;
using Cache = KvCache<bfloat16, WatchingEngine<cpu::Engine<>>>;

// What rows outside the runs got; both ascend.
float share_outside(const RowRuns& runs, std::span<const RowAttention> attention) {
  float share = 0;
  auto run = runs.begin();
  for (const RowAttention& row : attention) {
    while (run != runs.end() && run->first + run->rows <= row.row) ++run;
    if (run == runs.end() || row.row < run->first) share += row.share;
  }
  return share;
}

// Reads one text with the model and records a step for each call.
class Recorder {
 public:
  Recorder(const reference::Llama& model, Plan plan, float least_attention)
      : model_{&model},
        watch_{.least_attention = least_attention, .heads = {}},
        cache_{std::move(plan), CacheOptions{.value_outputs = model.value_outputs()},
               WatchingEngine<cpu::Engine<>>{watch_}} {}

  /// Returns the logits after the last token.
  std::vector<float> read(std::span<const int> tokens, StepKind kind, const AttendOptions& options) {
    reference::require_ready(*model_, cache_);
    const ModelShape& shape = cache_.plan().shape();
    Step step = empty_step(kind);
    const auto attend = [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                            TensorView<const float> v, TensorView<float> out) {
      std::vector<UnreadShare> unread;
      if (options.read == Read::bounded) {
        unread = attend_in_parts(layer, q, k, v, out, options);
      } else {
        cache_.step(layer, q, k, v, out, options);
      }
      for (std::size_t head = 0; head < shape.kv_heads; ++head) {
        WatchedHead& seen = watch_.heads[head];
        HeadStep& own = step.heads[layer * shape.kv_heads + head];
        own.read = std::move(seen.read);
        own.bytes_read = seen.bytes_read;
        own.attention = std::move(seen.attention);
        if (!unread.empty()) own.unread = unread[head];
      }
    };
    std::vector<float> logits = model_->forward(tokens, cache_.tokens(), attend);
    add(std::move(step));
    return logits;
  }

  void compress() {
    cache_.compress();
    add(empty_step(StepKind::compress));
  }

  [[nodiscard]] std::vector<Step>& steps() { return steps_; }

 private:
  // A read of one token with a bound. What the rows that stay unread would get is looked at before, over all rows.
  std::vector<UnreadShare> attend_in_parts(std::size_t layer, const TensorView<const float>& q,
                                           const TensorView<const float>& k, const TensorView<const float>& v,
                                           const TensorView<float>& out, AttendOptions options) {
    const std::size_t kv_heads = cache_.plan().shape().kv_heads;
    std::vector<SegmentList> rows;
    for (std::size_t head = 0; head < kv_heads; ++head) {
      rows.push_back(cache_.segments(layer, head));
      rows.back().push_back(call_segment(ConstTensor{k}, ConstTensor{v}, head, cache_.tokens()));
    }
    LayerAttention all;
    all.queries = ConstTensor{q};
    all.first_position = static_cast<std::int64_t>(cache_.tokens());
    const std::vector<std::span<const Segment>> views{rows.begin(), rows.end()};
    all.heads = views;
    all.options = options;
    if (all.options.softcap == 0.0F) all.options.softcap = cache_.plan().shape().layer(layer).softcap;
    const float least = std::exchange(watch_.least_attention, 0.0F);
    cache_.engine().look(all);
    watch_.least_attention = least;
    for (WatchedHead& head : watch_.heads) {
      head.read.clear();
      head.bytes_read = 0;
    }
    std::vector<float> bounds(q.heads);
    options.bound.unread = bounds;
    watch_.in_parts = true;
    cache_.step(layer, q, k, v, out, options);
    watch_.in_parts = false;
    std::vector<UnreadShare> unread(kv_heads);
    const std::size_t group = q.heads / kv_heads;
    for (std::size_t head = 0; head < kv_heads; ++head) {
      for (std::size_t i = 0; i < group; ++i) {
        unread[head].bound += bounds[head * group + i] / static_cast<float>(group);
      }
      WatchedHead& seen = watch_.heads[head];
      unread[head].measured = share_outside(seen.read, seen.attention);
      std::erase_if(seen.attention, [&](const RowAttention& row) { return row.share < least; });
    }
    return unread;
  }

  [[nodiscard]] Step empty_step(StepKind kind) const {
    Step step{.kind = kind};
    step.heads.resize(cache_.plan().shape().kv_head_count());
    return step;
  }

  void add(Step step) {
    const ModelShape& shape = cache_.plan().shape();
    step.tokens = cache_.tokens();
    step.bytes = cache_.bytes();
    step.full_head_bytes = FullCache<DenseStorage<bfloat16>>::bytes_of_tokens(
        {}, cache_.options().context(shape.head_dim), step.tokens);
    for (std::size_t head = 0; head < step.heads.size(); ++head) {
      note_kept(head / shape.kv_heads, head % shape.kv_heads, step.heads[head]);
    }
    steps_.push_back(std::move(step));
  }

  // All rows are committed, because the cache allows no rollback. It is enough to list what the
  // latest query could see: a window moves by a row for the next query, which sees no older rows.
  void note_kept(std::size_t layer, std::size_t head, HeadStep& step) const {
    SegmentList shown;
    const ReadRequest request{static_cast<std::int64_t>(cache_.tokens()) - 1, 1, Read::all};
    const Head& own = cache_.head(layer, head);
    own.show(request, shown);
    step.bytes = own.bytes();
    std::vector<std::size_t> kept, exact;
    for (const Segment& segment : shown) {
      const bool quantized =
          is_quantized(segment.keys.format.encoding) || is_quantized(segment.values.format.encoding);
      segment.for_each_run([&](const RowRun& run) {
        for (std::size_t row = run.first; row < run.first + run.rows; ++row) {
          kept.push_back(static_cast<std::size_t>(segment.position_of(row)));
          if (!quantized) exact.push_back(kept.back());
        }
      });
    }
    step.kept = runs_of(std::move(kept));
    step.exact = runs_of(std::move(exact));
  }

  const reference::Llama* model_;
  Watch watch_;
  Cache cache_;
  std::vector<Step> steps_;
};

std::vector<std::string> texts_of(const reference::Tokenizer& tokenizer, std::span<const int> tokens) {
  reference::TextStream stream{tokenizer};
  std::vector<std::string> texts;
  for (const int token : tokens) texts.push_back(stream.next(token));
  if (!texts.empty()) texts.back() += stream.finish();
  return texts;
}

}  // namespace

std::size_t rows_in(const RowRuns& runs) {
  std::size_t rows = 0;
  for (const RowRun& run : runs) rows += run.rows;
  return rows;
}

bool holds_row(const RowRuns& runs, std::size_t row) {
  return std::ranges::any_of(
      runs, [&](const RowRun& run) { return row >= run.first && row - run.first < run.rows; });
}

RowRuns runs_of(std::vector<std::size_t> rows) {
  std::ranges::sort(rows);
  RowRuns runs;
  for (const std::size_t row : rows) {
    if (runs.empty() || row > runs.back().first + runs.back().rows) {
      runs.push_back({row, 1});
    } else if (row == runs.back().first + runs.back().rows) {
      ++runs.back().rows;
    }
  }
  return runs;
}

std::string Recording::new_text() const {
  std::string text;
  for (std::size_t i = prompt_tokens; i < texts.size(); ++i) text += texts[i];
  return text;
}

Recording record(const TextModel& model, HeadPlan<bfloat16> plan, std::span<const int> prompt,
                 const RecordSettings& settings, const RecordReport& report) {
  require<ShapeError>(!prompt.empty(), "record: the prompt is empty, expected at least 1 token");
  require(settings.prompt_steps >= 1, "record: prompt_steps is 0, must be at least 1");
  const reference::LlamaConfig& config = model.config();
  reference::limit_windows(plan, config);
  const PlanNeeds needs = needs_of(plan);
  require_no_scoring(needs, "visualize");
  Recording recording{.heads = plan,
                      .tokens = {prompt.begin(), prompt.end()},
                      .prompt_tokens = prompt.size(),
                      .piece = (prompt.size() - 1) / settings.prompt_steps + 1,
                      .least_attention = settings.least_attention};
  Recorder recorder{model.llama(), std::move(plan), settings.least_attention};
  const std::size_t total = prompt.size() + settings.most_new;
  const auto tell = [&](std::size_t done) {
    if (report) report(done, total);
  };
  std::vector<float> logits;
  for (std::size_t done = 0; done < prompt.size();) {
    const std::size_t count = std::min(recording.piece, prompt.size() - done);
    logits = recorder.read(prompt.subspan(done, count), StepKind::prompt, {});
    done += count;
    tell(done);
  }
  if (needs.compress) recorder.compress();
  const Reading how = settings.reading.value_or(Reading{
      .read = needs.selected_reads ? Read::selected : Read::all, .refresh_each_step = needs.selected_reads});
  AttendOptions reading{.read = how.read, .refresh_selection = how.refresh_each_step};
  reading.bound.epsilon = how.epsilon;
  reading.bound.certainty = how.certainty;
  const Stops stops = stops_at(model.tokenizer(), settings.stop);
  for (std::size_t count = 0; count < settings.most_new; ++count) {
    const int token = reference::likeliest(logits);
    if (model.is_end(token)) break;
    recording.tokens.push_back(token);
    logits = recorder.read(std::array{token}, StepKind::generate, reading);
    tell(recording.tokens.size());
    if (stops && stops(std::span{recording.tokens}.subspan(prompt.size()))) break;
  }
  recording.texts = texts_of(model.tokenizer(), recording.tokens);
  recording.steps = std::move(recorder.steps());
  return recording;
}

}  // namespace kvpolicy::tools
