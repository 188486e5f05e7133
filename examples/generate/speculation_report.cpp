// SPDX-License-Identifier: Apache-2.0
#include "speculation_report.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <utility>

#include <fmt/format.h>

#include <kvpolicy/format.hpp>

#include "../common/table.hpp"
#include "../common/terminal.hpp"

namespace kvpolicy::tools {
namespace {

std::string text_of(const reference::Tokenizer& tokenizer, const std::vector<NewToken>& said) {
  std::vector<int> tokens;
  for (const NewToken& token : said) tokens.push_back(token.token);
  return tokenizer.decode(tokens);
}

std::size_t questions_asked(const std::vector<SpeculationTurn>& turns) {
  return static_cast<std::size_t>(
      std::ranges::count_if(turns, [](const SpeculationTurn& turn) { return !turn.answer.empty(); }));
}

std::size_t right_answers(const reference::Tokenizer& tokenizer, const std::vector<SpeculationTurn>& turns,
                          const SpeculationResult& result) {
  std::size_t right = 0;
  for (std::size_t turn = 0; turn < turns.size(); ++turn) {
    const std::string& answer = turns[turn].answer;
    if (answer.empty()) continue;
    if (text_of(tokenizer, result.tokens_of_turn(turn)).starts_with(answer)) ++right;
  }
  return right;
}

// The cost model describes runs of draft tokens, not trees.
bool is_predicted(const SpeculativeText& text) { return text.setup().structure != Structure::tree; }
bool is_greedy(const SpeculativeText& text) { return text.setup().options.sampling.temperature == 0.0F; }

const char* name_of(Ending ending) {
  switch (ending) {
    case Ending::stop_token: return "stop";
    case Ending::length: return "max-new";
    case Ending::capacity: return "capacity";
    case Ending::cancelled: return "cancelled";
    case Ending::open: break;
  }
  return "open";
}

void print_levels(const SpeculationResult& result) {
  Table table;
  table.add_column("level", "", Align::left);
  table.add_column("passes");
  table.add_column("judged");
  table.add_column("accepted");
  table.add_column("tokens", "a pass");
  table.add_column("ms", "a pass");
  table.add_column("share", "of time");
  for (const LevelReport& level : result.levels) {
    const auto passes = static_cast<double>(std::max<std::size_t>(level.passes, 1));
    table.add_row({level.name, thousands(level.passes), level.judged == 0 ? "-" : thousands(level.judged),
                   percent(level.acceptance()), fixed(level.tokens_per_pass(), 2),
                   fixed(1e3 * level.seconds / passes, 2), percent(level.seconds / result.seconds)});
  }
  fmt::print("{}\n", table.text(wants_colour(stdout)));
}

void print_line(const char* what, const std::string& line) { fmt::print("  {:10} {}\n", what, line); }

}  // namespace

SpeculationDisplay::SpeculationDisplay(const std::vector<SpeculationTurn>& turns, TokenStrip strip)
    : turns_{&turns}, strip_{std::move(strip)} {}

SpeculationWatcher SpeculationDisplay::watcher() {
  const auto read = [this](std::size_t done, std::size_t total) {
    if (total < 1000) return;  // a question is short and needs no progress
    progress_.update(static_cast<double>(done) / static_cast<double>(total),
                     fmt::format("reads token {} of {}", thousands(done), thousands(total)));
  };
  return {.reads = read,
          .begins = [this](std::size_t turn) { begin(turn); },
          .token = [this](const NewToken& token) { add(token); },
          .ends = [this](std::size_t turn) { end(turn); }};
}

void SpeculationDisplay::begin(std::size_t turn) {
  progress_.clear();
  if (turn == 0) fmt::print("{}\n\n", strip_.legend());
  const std::string& question = (*turns_)[turn].question;
  if (!question.empty()) fmt::print("{}\n", question);
  std::fflush(stdout);
}

void SpeculationDisplay::add(const NewToken& token) {
  if (!strip_.has_colour()) return waiting_.push_back(token);
  fmt::print("{}", strip_.coloured(token));
  std::fflush(stdout);
}

void SpeculationDisplay::end(std::size_t turn) {
  fmt::print("{}", strip_.has_colour() ? "\n" : strip_.marked(waiting_));
  waiting_.clear();
  if (turn + 1 == turns_->size()) fmt::print("\n");
  std::fflush(stdout);
}

void print_report(const reference::Tokenizer& tokenizer, const SpeculativeText& text,
                  const std::vector<SpeculationTurn>& turns, const SpeculationResult& result) {
  print_levels(result);
  print_line(named(text.setup().structure).name,
             fmt::format("{} ms/token: {} tokens in {} verifications, {} each",
                         fixed(1e3 * result.seconds_per_token(), 2), thousands(result.tokens),
                         thousands(result.steps.size()), fixed(result.tokens_per_verification(), 2)));
  if (result.plain_tokens > 0) {
    print_line("plain", fixed(1e3 * result.plain_seconds_per_token(), 2) + " ms/token, " +
                            (!is_greedy(text)   ? "of a draw of its own"
                             : result.same_text ? "the same text, token for token"
                                                : "but another text"));
    std::string speedup = fixed(result.speedup(), 2) + " times";
    if (is_predicted(text)) {
      speedup += fmt::format("; {} by the cost model, from this acceptance and these times",
                             fixed(result.predicted_speedup(), 2));
    }
    print_line("speed-up", speedup);
  }
  if (const std::size_t asked = questions_asked(turns); asked > 0) {
    print_line("answers", fmt::format("{} of {} right", right_answers(tokenizer, turns, result), asked));
  }
  print_line("prompt", fmt::format("{} tokens in {} ms", thousands(turns.front().prompt.size()),
                                   fixed(1e3 * result.prefill_seconds, 0)));
  std::string memory = fmt::format("{:MB}", Bytes{text.bytes()});
  if (text.draft_bytes() > 0) {
    memory += fmt::format(" and the draft's {:MB}", Bytes{text.draft_bytes()});
  }
  if (text.levels().size() > 1 && text.levels()[1].read == Read::selected) {
    memory += fmt::format("; {} new selections since the prompt", result.refreshes);
  }
  print_line("KV cache", memory);
}

nlohmann::json as_json(const reference::Tokenizer& tokenizer, const SpeculativeText& text,
                       const std::vector<SpeculationTurn>& turns, const SpeculationResult& result) {
  nlohmann::json turns_json = nlohmann::json::array();
  for (std::size_t turn = 0; turn < turns.size(); ++turn) {
    nlohmann::json steps = nlohmann::json::array();
    for (const SpeculationStep& step : result.steps) {
      if (step.turn != turn) continue;
      nlohmann::json tokens = nlohmann::json::array();
      nlohmann::json levels = nlohmann::json::array();
      for (const NewToken& token : step.tokens) {
        tokens.push_back(token.token);
        levels.push_back(token.level);
      }
      steps.push_back({{"guessed", step.guessed},
                       {"tokens", std::move(tokens)},
                       {"levels", std::move(levels)},
                       {"ms", 1e3 * step.seconds}});
    }
    nlohmann::json one{{"prompt_tokens", turns[turn].prompt.size()},
                       {"steps", std::move(steps)},
                       {"text", text_of(tokenizer, result.tokens_of_turn(turn))},
                       {"ended_by", name_of(result.endings[turn])}};
    if (!turns[turn].answer.empty()) {
      one["question"] = turns[turn].question;
      one["answer"] = turns[turn].answer;
    }
    turns_json.push_back(std::move(one));
  }
  nlohmann::json levels = nlohmann::json::array();
  for (const LevelReport& level : result.levels) {
    nlohmann::json one{{"name", level.name},         {"passes", level.passes}, {"judged", level.judged},
                       {"accepted", level.accepted}, {"tokens", level.tokens}, {"ms", 1e3 * level.seconds}};
    if (level.judged > 0) one["acceptance"] = level.acceptance();
    levels.push_back(std::move(one));
  }
  nlohmann::json json{{"method", named(text.setup().structure).name},
                      {"proposers", text.proposers()},
                      {"prompt_tokens", result.prompt_tokens},
                      {"new_tokens", result.tokens},
                      {"turns", std::move(turns_json)},
                      {"levels", std::move(levels)},
                      {"verifications", result.steps.size()},
                      {"tokens_per_verification", result.tokens_per_verification()},
                      {"refreshes", result.refreshes},
                      {"kv_bytes", text.bytes()},
                      {"draft_kv_bytes", text.draft_bytes()},
                      {"prefill_ms", 1e3 * result.prefill_seconds},
                      {"decode_ms_per_token", 1e3 * result.seconds_per_token()}};
  if (questions_asked(turns) > 0) json["right"] = right_answers(tokenizer, turns, result);
  if (result.plain_tokens > 0) {
    json["plain_ms_per_token"] = 1e3 * result.plain_seconds_per_token();
    json["speedup"] = result.speedup();
    if (is_predicted(text)) json["predicted_speedup"] = result.predicted_speedup();
    if (is_greedy(text)) json["same_text"] = result.same_text;
  }
  return json;
}

}  // namespace kvpolicy::tools
