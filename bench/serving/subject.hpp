// SPDX-License-Identifier: Apache-2.0
//
// What is served: a model that reads texts, whose answers can be judged, or the shape of a large one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <kvpolicy/duo.hpp>
#include <kvpolicy/headkv.hpp>
#include <kvpolicy/io/low_bits.hpp>

#include "bench/cpu/headkv_sample.hpp"
#include "common/asked_question.hpp"
#include "common/head_files.hpp"
#include "common/plan_name.hpp"
#include "common/retrieval_text.hpp"
#include "common/text_model.hpp"
#include "random_rows.hpp"
#include "serve/llama_served.hpp"
#include "settings.hpp"
#include "tool_plan.hpp"

namespace kvpolicy::bench {

struct DrawnRequest {
  std::vector<int> prompt;
  std::size_t system = 0;  ///< tokens of the shared text that it begins with
  std::size_t max_new = 1;
  std::function<bool(std::span<const int>)> is_right = {};  ///< empty: no answer is known
};

class Subject {
 public:
  Subject() = default;
  Subject(const Subject&) = delete;
  Subject& operator=(const Subject&) = delete;
  virtual ~Subject() = default;

  [[nodiscard]] virtual serve::ServedModel& served() = 0;
  /// @throws ConfigError for a plan that the model has not
  [[nodiscard]] virtual serve::Plan plan_named(const std::string& name) const = 0;
  /// `number`: which of the traffic's requests begin; equal numbers give equal requests.
  [[nodiscard]] virtual std::vector<DrawnRequest> draw(const Traffic& traffic, std::size_t count) const = 0;
  /// So many tokens of text. Other numbers give other texts.
  [[nodiscard]] virtual std::vector<int> text(std::size_t tokens, std::size_t number) const = 0;
  /// The plans that are compared: the published settings, where they suit the model.
  [[nodiscard]] virtual std::vector<std::string> plans() const {
    return {"full", "int8", "duo:0.5", "duo+int4:0.5", "headkv:128"};
  }
  /// MiB of the budget that they are compared at.
  [[nodiscard]] virtual std::size_t memory() const = 0;
  [[nodiscard]] virtual Json about() const = 0;

  [[nodiscard]] std::shared_ptr<const serve::Plan> plan(const std::string& name) {
    serve::Plan made = plan_named(name);
    served().fit(made);
    return std::make_shared<const serve::Plan>(std::move(made));
  }
};

/// Llama-3-8B's attention, or fewer layers of it. Plans that need a model's gates or scores get made-up ones: every
/// other head retrieves, and scores as uneven as those of the shipped model.
class ShapeSubject final : public Subject {
 public:
  explicit ShapeSubject(const ModelShape& shape) : rows_{shape} {}
  explicit ShapeSubject(std::size_t layers) : ShapeSubject{ModelShape{layers, 32, 8, 128}} {}

  [[nodiscard]] serve::ServedModel& served() override { return rows_; }

  [[nodiscard]] serve::Plan plan_named(const std::string& name) const override {
    tools::PlanName spec{name};
    const ModelShape shape = rows_.shape();
    if (spec.name == "duo" && spec.source.empty()) {
      spec.place({"sparsity"});
      const DuoConfig config{.sparsity = spec.number("sparsity", 0.5), .sinks = 64, .recent = 256};
      const bool exact = spec.storage.empty();
      const HeadSettings<bfloat16> retrieval =
          exact ? typename FullCache<DenseStorage<bfloat16>>::Config{}
                : io::text_format(spec, spec.storage, shape).head<bfloat16>();
      spec.refuse_others();
      std::vector<double> values(shape.layers * shape.kv_heads);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = i % 2 == 0 ? 1.0 : 0.0;
      const HeadGates gates{shape.layers, shape.kv_heads, std::move(values)};
      return duo_plan<bfloat16>(shape, gates, config, retrieval);
    }
    if (spec.name == "headkv" && spec.source.empty()) {
      spec.place({"capacity"});
      const HeadKvConfig config{.capacity = spec.count("capacity", 128)};
      const bool exact = spec.storage.empty();
      const ResidualConfig survivors =
          exact ? ResidualConfig{} : io::row_format(spec, spec.storage, shape, 0);
      spec.refuse_others();
      const HeadScores sample = sample_scores();
      std::vector<double> values(shape.layers * shape.q_heads);
      for (std::size_t i = 0; i < values.size(); ++i) values[i] = sample.values()[i % sample.values().size()];
      const HeadScores scores{shape.layers, shape.q_heads, std::move(values)};
      if (exact) return headkv_plan<bfloat16>(shape, scores, config);
      return quantized_headkv_plan<bfloat16>(shape, scores, config, survivors);
    }
    tools::PlanArguments arguments;
    arguments.plan = name;
    tools::require_no_bound(name, "serving_bench");
    return tools::make_plan<bfloat16>(arguments, shape);
  }

  [[nodiscard]] std::vector<DrawnRequest> draw(const Traffic& traffic, std::size_t count) const override {
    tools::Random random{traffic.seed, count, 0};
    std::vector<DrawnRequest> all(count);
    for (std::size_t i = 0; i < count; ++i) {
      DrawnRequest& one = all[i];
      if (!traffic.systems.empty()) {
        const std::size_t which = random.below(traffic.systems.size());
        one.prompt = text(traffic.systems[which], 1000 + which);
      }
      one.system = one.prompt.size();
      const std::vector<int> own = text(traffic.own.draw(random), 2000 + i);
      one.prompt.insert(one.prompt.end(), own.begin(), own.end());
      one.max_new = traffic.answer.draw(random);
    }
    return all;
  }

  [[nodiscard]] std::vector<int> text(std::size_t tokens, std::size_t number) const override {
    tools::Random random{7, 0, number};
    std::vector<int> all(tokens);
    for (int& token : all) token = static_cast<int>(random.below(rows_.vocabulary()));
    return all;
  }

  [[nodiscard]] std::size_t memory() const override { return 128 * rows_.shape().layers; }

  [[nodiscard]] Json about() const override {
    const ModelShape shape = rows_.shape();
    return {{"model", "Llama-3-8B's attention, random rows, no weights"},
            {"layers", shape.layers},
            {"q_heads", shape.q_heads},
            {"kv_heads", shape.kv_heads},
            {"head_dim", shape.head_dim}};
  }

 private:
  RandomRows rows_;
};

/// A model whose answers are as long as they were drawn: it does not end them by itself.
class EndlessLlama final : public serve::ServedModel {
 public:
  explicit EndlessLlama(const tools::TextModel& model) : llama_{model} {}
  [[nodiscard]] ModelShape shape() const override { return llama_.shape(); }
  [[nodiscard]] std::size_t context() const override { return llama_.context(); }
  void fit(serve::Plan& plan) const override { llama_.fit(plan); }
  [[nodiscard]] std::vector<reference::BatchedRead> read(std::span<const serve::StepCall> calls) override {
    return llama_.read(calls);
  }
  [[nodiscard]] bool is_end(int) const override { return false; }

 private:
  serve::LlamaServed llama_;
};

/// A model with its tokenizer. The shared texts hide facts, and every request asks for one of them.
class TextSubject final : public Subject {
 public:
  TextSubject(const std::string& folder, std::string name)
      : folder_{folder},
        name_{std::move(name)},
        model_{tools::TextModel::load(folder)},
        served_{model_},
        plain_{tools::evaluation_text()} {}

  [[nodiscard]] serve::ServedModel& served() override { return served_; }

  [[nodiscard]] serve::Plan plan_named(const std::string& name) const override {
    tools::PlanArguments arguments;
    arguments.plan = name;
    tools::require_no_bound(name, "serving_bench");
    return tools::make_plan<bfloat16>(arguments, model_.config().shape(), folder_);
  }

  [[nodiscard]] std::vector<DrawnRequest> draw(const Traffic& traffic, std::size_t count) const override {
    if (traffic.systems.empty()) return draw_unshared(traffic, count);
    tools::Random random{traffic.seed, count, 0};
    std::vector<tools::RetrievalText> systems;
    std::vector<std::vector<int>> system_tokens;
    for (std::size_t i = 0; i < traffic.systems.size(); ++i) {
      systems.push_back(text_with_facts(traffic.systems[i], traffic.seed, i));
      system_tokens.push_back(model_.encode(systems.back().body));
    }
    std::vector<DrawnRequest> all(count);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t which = random.below(systems.size());
      const tools::RetrievalText& system = systems[which];
      const tools::Question& question = system.questions[random.below(system.questions.size())];
      DrawnRequest& one = all[i];
      one.prompt = system_tokens[which];
      one.system = one.prompt.size();
      const std::size_t own_tokens = traffic.own.draw(random);
      std::vector<int> own = model_.encode_after(system.body, " " + plain_text(own_tokens, i));
      own.resize(std::min(own.size(), own_tokens));
      one.prompt.insert(one.prompt.end(), own.begin(), own.end());
      const tools::AskedQuestion asked{model_, system.body + model_.decode(own), question};
      one.prompt.insert(one.prompt.end(), asked.question().begin(), asked.question().end());
      one.max_new = std::max(traffic.answer.draw(random), asked.answer().size() + 4);
      one.is_right = [asked](std::span<const int> said) { return asked.is_right(said); };
    }
    return all;
  }

  [[nodiscard]] std::vector<int> text(std::size_t tokens, std::size_t number) const override {
    return tools::draw_plain_tokens(model_, plain_, tokens, {.seed = 7, .number = number});
  }

  // A byte is less than a word-piece: votes are pooled over more rows (docs/results.md).
  [[nodiscard]] std::vector<std::string> plans() const override {
    std::vector<std::string> names = Subject::plans();
    if (reads_bytes()) names.back() = "headkv:128,kernel=29,beta=2";
    // A fifth of the bytes, as duo+int4:0.5, spent by what was measured of each head.
    if (std::error_code none; std::filesystem::exists(tools::head_file(folder_, "damage.json"), none)) {
      names.push_back("search:0.2,4096");
    }
    return names;
  }

  [[nodiscard]] std::size_t memory() const override { return reads_bytes() ? 64 : 512; }

  [[nodiscard]] Json about() const override {
    const ModelShape shape = model_.config().shape();
    return {{"model", name_},
            {"parameters", model_.llama().parameters()},
            {"layers", shape.layers},
            {"q_heads", shape.q_heads},
            {"kv_heads", shape.kv_heads},
            {"head_dim", shape.head_dim}};
  }

 private:
  [[nodiscard]] bool reads_bytes() const { return model_.config().vocabulary == 256; }
  // `number`: which of a seed's texts.
  [[nodiscard]] tools::RetrievalText text_with_facts(std::size_t tokens, std::uint64_t seed,
                                                     std::size_t number) const {
    const tools::RetrievalTextConfig config{
        .questions = 8,
        .kind = reads_bytes() ? tools::FactKind::keys : tools::FactKind::words,
        .lead_in = !reads_bytes(),  // such models go on better than they answer
        .seed = seed,
        .number = number};
    return tools::draw_text_in_tokens(model_, plain_, tokens, config);
  }
  // Each request has facts of its own, and asks for one of them.
  [[nodiscard]] std::vector<DrawnRequest> draw_unshared(const Traffic& traffic, std::size_t count) const {
    tools::Random random{traffic.seed, count, 0};
    std::vector<DrawnRequest> all(count);
    for (std::size_t i = 0; i < count; ++i) {
      const tools::RetrievalText text = text_with_facts(traffic.own.draw(random), traffic.seed, 5000 + i);
      const tools::AskedQuestion asked{model_, text.body,
                                       text.questions[random.below(text.questions.size())]};
      DrawnRequest& one = all[i];
      one.prompt = model_.encode(text.body);
      one.prompt.insert(one.prompt.end(), asked.question().begin(), asked.question().end());
      one.max_new = std::max(traffic.answer.draw(random), asked.answer().size() + 4);
      one.is_right = [asked](std::span<const int> said) { return asked.is_right(said); };
    }
    return all;
  }
  // Text of at least so many tokens, in all likelihood.
  [[nodiscard]] std::string plain_text(std::size_t tokens, std::size_t number) const {
    const auto bytes = static_cast<std::size_t>(
        1.2 * static_cast<double>(tokens) * std::max(1.0, model_.bytes_per_token(plain_.substr(0, 4096))));
    return tools::draw_plain_text(plain_, {.length = bytes + 16, .seed = 11, .number = number}).body;
  }

  std::string folder_, name_;
  tools::TextModel model_;
  EndlessLlama served_;
  std::string plain_;
};

}  // namespace kvpolicy::bench
