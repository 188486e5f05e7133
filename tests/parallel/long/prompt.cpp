// SPDX-License-Identifier: Apache-2.0
//
// A prompt of 64 Ki tokens over ranks that are threads, against one rank: a small random model of which half of the
// heads keep every row and half have a window. All logits are compared, and those of some tokens after the prompt.
//
// One rank adds up the weights of n rows in float one after the other, which may be off by n / 2^24 of the sum; ranks
// add up shorter stretches. So logits, which are a few units large, may differ by as much. (At 16 Ki tokens plain loops
// in double say the same as three ranks to 2.5e-5, and as one rank to 6.5e-5.)
//
//   long_prompt [TOKENS [RANKS]]
#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <span>
#include <thread>
#include <vector>

#include <kvpolicy/cpu/engine.hpp>
#include <kvpolicy/plan/prompt_moves.hpp>
#include <kvpolicy/plan/shards.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <reference_model/parallel/parallel_llama.hpp>
#include <reference_model/parallel/prefill_over_ranks.hpp>
#include <reference_model/parallel/rank_cache.hpp>
#include <reference_model/run.hpp>

#include "model/golden.hpp"
#include "parallel/thread_ranks.hpp"
#include "support/tensors.hpp"

namespace {

using namespace kvpolicy;
using namespace kvpolicy::reference;
using Window = SinkRecentCache<DenseStorage<float>>::Config;
using Engine = cpu::Engine<>;

constexpr std::size_t after = 5;  // tokens after the prompt

// Attention falls on few of all rows, anywhere in the text, so that no row may be missing: see `run`.
Llama small_model() {
  LlamaConfig c;
  c.vocabulary = 61;
  c.hidden = 24;
  c.intermediate = 32;
  c.layers = 2;
  c.q_heads = 4;
  c.kv_heads = 2;
  c.head_dim = 16;
  c.max_positions = 1 << 20;
  c.windows.assign(c.layers, 0);
  test::Random random{64};
  const auto matrix = [&](std::size_t inputs, std::size_t outputs, float deviation) {
    std::vector<float> numbers(inputs * outputs);
    for (float& number : numbers) number = deviation * test::normal(random);
    return Linear{inputs, outputs, std::move(numbers), {}};
  };
  const auto ones = [&] { return std::vector<float>(c.hidden, 1.0F); };
  LlamaWeights w;
  w.embedding = matrix(c.hidden, c.vocabulary, 1.0F);
  w.norm = ones();
  w.head = matrix(c.hidden, c.vocabulary, 0.3F);
  for (std::size_t i = 0; i < c.layers; ++i) {
    LlamaLayer layer;
    layer.attention_norm = ones();
    layer.q = matrix(c.hidden, c.q_heads * c.head_dim, 0.4F);
    layer.k = matrix(c.hidden, c.kv_heads * c.head_dim, 0.4F);
    layer.v = matrix(c.hidden, c.kv_heads * c.head_dim, 0.2F);
    layer.o = matrix(c.q_heads * c.head_dim, c.hidden, 0.2F);
    layer.mlp_norm = ones();
    layer.gate = matrix(c.hidden, c.intermediate, 0.2F);
    layer.up = matrix(c.hidden, c.intermediate, 0.2F);
    layer.down = matrix(c.intermediate, c.hidden, 0.2F);
    w.layers.push_back(std::move(layer));
  }
  return Llama{c, std::move(w)};
}

std::vector<float> read_alone(const Llama& model, const HeadPlan<float>& plan, std::span<const int> tokens) {
  KvCache<float, Engine> cache{plan};
  const std::span<const int> prompt = tokens.first(tokens.size() - after);
  std::vector<float> logits = step(model, cache, prompt, LogitsOf::all);
  for (std::size_t at = prompt.size(); at < tokens.size(); ++at) {
    const std::vector<float> more = step(model, cache, tokens.subspan(at, 1));
    logits.insert(logits.end(), more.begin(), more.end());
  }
  return logits;
}

void run(std::size_t tokens_of_prompt, std::size_t ranks) {
  const Llama model = small_model();
  HeadPlan<float> plan{model.config().shape()};
  for (std::size_t layer = 0; layer < model.config().layers; ++layer)
    plan.set(layer, layer % 2, Window{.sinks = 4, .recent = 200});
  std::vector<int> tokens;
  test::Random random{65};
  for (std::size_t i = 0; i < tokens_of_prompt + after; ++i)
    tokens.push_back(static_cast<int>(test::below(random, model.config().vocabulary)));
  const std::span<const int> prompt = std::span<const int>{tokens}.first(tokens_of_prompt);

  const Shards shards = balance(plan, tokens.size(), {.ranks = ranks});
  std::vector<float> found;
  for (const std::exception_ptr& one : test::run_ranks(ranks, [&](Communicator& own) {
         RankCache<float, Engine> cache{plan, shards, own};
         std::vector<float> logits = prefill_over_ranks(model, cache, prompt, LogitsOf::all);
         ParallelLlama parallel{model, shards, own};
         for (std::size_t at = prompt.size(); at < tokens.size(); ++at) {
           const std::vector<float> more =
               parallel.forward(std::span<const int>{tokens}.subspan(at, 1), cache);
           logits.insert(logits.end(), more.begin(), more.end());
         }
         if (own.rank() == 0) found = std::move(logits);
       })) {
    if (one) std::rethrow_exception(one);
  }
  // What one rank says, and what it would say if rows were missing: an eighth of them.
  HeadPlan<float> short_plan = plan;
  for (std::size_t layer = 0; layer < model.config().layers; ++layer)
    short_plan.set(layer, 1 - layer % 2,
                   Window{.sinks = tokens_of_prompt / 8, .recent = tokens_of_prompt * 3 / 4});
  std::vector<float> expected;
  std::thread other{[&] { expected = read_alone(model, plan, tokens); }};
  const std::vector<float> of_fewer = read_alone(model, short_plan, tokens);
  other.join();
  const float error = largest_error(found, expected);
  const float missing = largest_error(of_fewer, expected);
  std::printf("%zu tokens over %zu ranks: largest error %g; without an eighth of the rows it would be %g\n",
              tokens_of_prompt, ranks, static_cast<double>(error), static_cast<double>(missing));
  const float bound = static_cast<float>(tokens_of_prompt) * 0x1p-24F;
  require(error <= bound, "the logits are off by ", error, ", at most ", bound, " is rounding");
  require(missing >= 100 * bound, "rows could be missing, which would change logits by ", missing);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc > 1 ? std::strtoul(argv[1], nullptr, 10) : std::size_t{1} << 16,
        argc > 2 ? std::strtoul(argv[2], nullptr, 10) : 3);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
