// SPDX-License-Identifier: Apache-2.0
#include "plan_search.hpp"

#include <charconv>
#include <cmath>
#include <filesystem>

#include <fmt/format.h>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/damage_json.hpp>
#include <kvpolicy/io/duo_pattern.hpp>
#include <kvpolicy/io/head_scores.hpp>
#include <kvpolicy/plan/search_menu.hpp>

#include "error_text.hpp"
#include "head_files.hpp"
#include "model_sizes.hpp"
#include "pattern_folder.hpp"
#include "terminal.hpp"

namespace kvpolicy::tools {
namespace {

namespace fs = std::filesystem;

SearchChoices measured(const fs::path& file, const ModelShape& shape) {
  io::DamageTable<bfloat16> table = io::load_damage<bfloat16>(file);
  require(table.shape == shape, file.string(), ": was measured on a model of ", table.shape.layers,
          " layers, ", table.shape.q_heads, " query heads, ", table.shape.kv_heads, " KV heads, head_dim ",
          table.shape.head_dim, "; this one has ", shape.layers, ", ", shape.q_heads, ", ", shape.kv_heads,
          ", ", shape.head_dim);
  return {std::move(table.choices),
          fmt::format("damages measured at {} tokens ({})", thousands(table.context), file.string()),
          table.epsilon};
}

SearchChoices guessed(const HeadGates& importance, const ModelShape& shape, std::size_t context,
                      const std::string& from) {
  return {choices_by_importance<bfloat16>(shape, importance, context), "a rule of thumb over " + from, {}};
}

SearchChoices from_gates(const fs::path& path, const ModelShape& shape, std::size_t context) {
  const fs::path folder = pattern_folder(path);
  const HeadGates gates = io::load_duo_pattern(folder).gates;
  return named_by(folder.string(),
                  [&] { return guessed(gates, shape, context, "gates (" + folder.string() + ")"); });
}

SearchChoices from_scores(const fs::path& file, const ModelShape& shape, std::size_t context) {
  const HeadScores scores = io::load_head_scores(file);
  return named_by(file.string(), [&] {
    return guessed(importance_of(scores, shape), shape, context, "head scores (" + file.string() + ")");
  });
}

}  // namespace

SearchChoices search_choices(const HeadKnowledge& known, const ModelShape& shape, std::size_t context) {
  require(known.given() <= 1, "--damage, --gates and --scores: give one of them");
  if (!known.damage.empty()) return measured(known.damage, shape);
  if (!known.gates.empty()) return from_gates(known.gates, shape, context);
  if (!known.scores.empty()) return from_scores(known.scores, shape, context);
  require(!known.weights.empty(),
          "what is known about the heads? Give --damage, --gates or --scores, or a model folder "
          "(--weights) in which they lie");
  std::error_code ignored;
  const fs::path damage = head_file(known.weights, "damage.json");
  if (fs::exists(damage, ignored)) return measured(damage, shape);
  const fs::path gates = head_file(known.weights, "duo");
  if (fs::exists(gates, ignored)) return from_gates(gates, shape, context);
  return from_scores(require_head_file(known.weights, fs::path{"headkv"} / "retrieval_heads.json"), shape,
                     context);
}

std::size_t parse_budget(const std::string& text, double whole) {
  const std::size_t slash = text.find('/');
  if (slash == std::string::npos) return parse_bytes(text);
  const auto number = [&](const std::string& digits) {
    double value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    require(error == std::errc{} && end == digits.data() + digits.size() && value > 0 && std::isfinite(value),
            "'", text, "' is no share such as 1/8");
    return value;
  };
  const double share = number(text.substr(0, slash)) / number(text.substr(slash + 1));
  return static_cast<std::size_t>(share * whole);
}

}  // namespace kvpolicy::tools
