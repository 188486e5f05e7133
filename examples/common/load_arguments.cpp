// SPDX-License-Identifier: Apache-2.0
#include "load_arguments.hpp"

namespace kvpolicy::tools {

reference::LoadOptions LoadArguments::options() const {
  reference::LoadOptions options{.round_activations = activations == "bfloat16"};
  if (weights == "int8") options.weights = reference::WeightFormat::int8;
  if (weights == "float32") options.weights = reference::WeightFormat::float32;
  return options;
}

void add_load_options(CLI::App& app, LoadArguments& arguments) {
  app.add_option("--weights", arguments.weights, "Format of the weights in memory")
      ->check(CLI::IsMember({"as-stored", "float32", "int8"}))
      ->type_name("FORMAT")
      ->capture_default_str();
  app.add_option(
         "--activations", arguments.activations,
         "bfloat16: rounded where the processor multiplies that faster (AMX); prompts are read sooner")
      ->check(CLI::IsMember({"float32", "bfloat16"}))
      ->type_name("FORMAT")
      ->capture_default_str();
}

}  // namespace kvpolicy::tools
