// SPDX-License-Identifier: Apache-2.0
#include "plan_searched.hpp"

#include <limits>

#include <fmt/format.h>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/format.hpp>
#include <kvpolicy/io/plan_json.hpp>
#include <kvpolicy/plan/step_costs.hpp>

#include "../common/model_sizes.hpp"
#include "../common/terminal.hpp"
#include "plan_view.hpp"

namespace kvpolicy::tools {
namespace {

using Plan = HeadPlan<bfloat16>;

double read_in_all(const Plan& plan, std::size_t context) {
  double sum = 0;
  for (const auto& layer : bytes_read(plan, context)) {
    for (const double head : layer) sum += head;
  }
  return sum;
}

// Whether a head of the plan has a setting whose damage was measured under a bound.
bool has_bounded(const Plan& plan, const std::vector<HeadChoice<bfloat16>>& choices) {
  bool any = false;
  plan.for_each_head([&](std::size_t, std::size_t, const HeadSettings<bfloat16>& settings) {
    for (const auto& choice : choices) {
      any = any || (choice.settings == settings && !choice.rows_read.values().empty());
    }
  });
  return any;
}

}  // namespace

void SearchArguments::add_to(CLI::App& command) {
  command.add_option("OUTPUT", output, "Write the plan there")->type_name("FILE.json");
  command
      .add_option("--bytes", bytes,
                  "For the cache: 1/8 of a full one, or 64MB. Without --bytes-read 1/8, with it any number")
      ->type_name("SIZE");
  command
      .add_option("--bytes-read", bytes_read,
                  "For the rows that a step of decoding reads: 1/4 of those of a full cache, or 4MB")
      ->type_name("SIZE");
  command
      .add_option("--damage", known.damage,
                  "What `identify_heads damage` or `identify_heads shares` measured")
      ->type_name("FILE");
  command.add_option("--gates", known.gates, "Or a DuoAttention pattern")->type_name("FOLDER");
  command.add_option("--scores", known.scores, "Or HeadKV head scores")->type_name("FILE");
  command.add_option("--shape", shape, "The model, by name")->type_name("SHAPE");
  command
      .add_option("--weights", known.weights,
                  "Model folder with its shape and, unless given above, damage.json, duo/ or headkv/")
      ->type_name("DIR");
  command.footer(
      "Damages of single heads are added up, so the choice is exact where no head can replace "
      "another,\nand a good guess where some can. Gates and scores are converted to damages by a "
      "rule of thumb\n(include/kvpolicy/plan/search_menu.hpp); measured damages are better.\n"
      "A head that is read with a bound costs what `identify_heads shares` measured that it reads; only\n"
      "such files have these heads, and a plan with them says how it has to be read.");
}

SearchedPlan::SearchedPlan(const SearchArguments& arguments, std::size_t context, const CacheOptions& options)
    : output_{arguments.output}, context_{context} {
  const HeadKnowledge& known = arguments.known;
  require(!arguments.shape.empty() || !known.weights.empty(),
          "--shape is needed: a model's name, layers,q_heads,kv_heads,head_dim or a model folder; or "
          "--weights. Known:\n",
          known_shapes());
  const ModelShape shape = parse_shape(arguments.shape.empty() ? known.weights : arguments.shape);
  const Plan whole{shape};
  full_ = whole.memory(context, options).total();
  full_read_ = read_in_all(whole, context);
  SearchConfig config{
      .bytes = std::numeric_limits<std::size_t>::max(), .context = context, .options = options};
  if (!arguments.bytes.empty() || arguments.bytes_read.empty()) {
    const std::string bytes = arguments.bytes.empty() ? "1/8" : arguments.bytes;
    bytes_allowed_ = config.bytes = parse_budget(bytes, static_cast<double>(full_));
  }
  if (!arguments.bytes_read.empty()) {
    read_allowed_ = config.bytes_read = parse_budget(arguments.bytes_read, full_read_);
  }
  const SearchChoices menu = search_choices(known, shape, context);
  from_ = menu.from;
  choices_ = menu.choices.size();
  epsilon_ = menu.epsilon;
  found_ = search_plan<bfloat16>(shape, menu.choices, config);
  bounded_ = has_bounded(found_->plan, menu.choices);
  if (!output_.empty()) io::save_plan(output_, found_->plan);
}

std::string SearchedPlan::reading() const {
  if (!bounded_ || !epsilon_) return "";
  return fmt::format("bounded@{}:{:g}", output_.empty() ? "FILE.json" : output_, *epsilon_);
}

nlohmann::ordered_json SearchedPlan::json() const {
  nlohmann::ordered_json json = {{"from", from_}, {"context", context_}};
  json["bytes_allowed"] = bytes_allowed_ ? nlohmann::ordered_json(*bytes_allowed_) : nlohmann::ordered_json{};
  json["bytes"] = found_->bytes;
  json["bytes_full"] = full_;
  json["times_smaller"] = times_smaller();
  if (read_allowed_) {
    json["bytes_read_allowed"] = *read_allowed_;
    json["bytes_read"] = *found_->bytes_read;
    json["bytes_read_full"] = full_read_;
  }
  json["damage"] = found_->damage;
  json["choices"] = choices_;
  if (!reading().empty()) json["read_as"] = reading();
  json["plan"] = nlohmann::ordered_json::parse(io::format_plan(found_->plan));
  return json;
}

std::string SearchedPlan::text(bool colour) const {
  std::string text = fmt::format("{} at {} tokens, {:.2f}x smaller than a full cache", Bytes{found_->bytes},
                                 thousands(context_), times_smaller());
  if (bytes_allowed_) text += fmt::format(" ({} allowed)", Bytes{*bytes_allowed_});
  text += '\n';
  if (read_allowed_) {
    text += fmt::format("a step reads {} of rows, {} of a full cache's ({} allowed)\n",
                        Bytes{static_cast<std::size_t>(*found_->bytes_read)},
                        percent(*found_->bytes_read / full_read_), Bytes{*read_allowed_});
  }
  text += fmt::format("chosen among {} settings a head by {}; damage {:.4g}\n\n{}", choices_, from_,
                      found_->damage, plan_map(found_->plan, colour));
  if (!output_.empty()) text += fmt::format("\nwrote the plan {}\n", output_);
  if (!reading().empty()) {
    text += fmt::format("\nsome heads are read with a bound: give tools --plan {}\n", reading());
  }
  return text;
}

}  // namespace kvpolicy::tools
