// SPDX-License-Identifier: Apache-2.0
#include "duo_settings.hpp"

#include <filesystem>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::tools {

void settle(DuoSettings& a) {
  if (a.loss.empty()) a.loss = a.method == "ablation" ? "lm" : "distill";
  const bool plain = a.method == "optimise" && a.loss == "lm";
  if (!a.labelled.empty()) a.texts = "own";
  if (a.texts.empty()) a.texts = plain ? "plain" : "passkeys";
  a.set.kind = a.keys == "words" ? PasskeyKind::words : PasskeyKind::digits;
  require(a.mask != "sinks" || a.sinks > 0, "--mask sinks needs --sinks above 0");
  require(!a.resume || !a.out.empty(), "--resume needs --out, the folder to go on in");
  require(a.stop_after == 0 || !a.out.empty(), "--stop-after needs --out, or nothing is left to go on from");
}

reference::AttentionMask mask_of(const DuoSettings& a) {
  // A head that sees only sinks still sees its own token.
  if (a.mask == "sinks") return {.sinks = a.sinks, .recent = 1};
  if (a.mask == "recent") return {.sinks = 0, .recent = a.recent};
  return {.sinks = a.sinks, .recent = a.recent};
}

reference::GateObjective objective_of(const DuoSettings& a) {
  return a.loss == "lm" ? reference::GateObjective::language : reference::GateObjective::distillation;
}

io::Json json_of(const DuoSettings& a) {
  std::filesystem::path model{a.model};
  if (!model.has_filename()) model = model.parent_path();  // the path was "folder/"
  const reference::AttentionMask mask = mask_of(a);
  io::Json settings = {{"method", a.method},
                       {"model", model.filename().string()},
                       {"found_with_sinks", mask.sinks},
                       {"found_with_recent", mask.recent},
                       {"texts", a.texts}};
  if (a.texts == "own") {
    settings["labelled"] = std::filesystem::path{a.labelled}.filename().string();
    settings["labelled_digest"] = a.labelled_digest;
  } else {
    settings["context"] = a.set.context;
    settings["lengths"] = a.set.lengths;
    settings["seed"] = a.set.seed;
  }
  if (!a.text.empty()) settings["text"] = std::filesystem::path{a.text}.filename().string();
  if (a.texts == "passkeys") {
    settings["passkeys"] = a.set.passkeys;
    settings["passkey_kind"] = a.keys;
    settings["depths"] = a.set.depths;
  }
  if (a.method != "profile") settings["loss"] = a.loss;
  if (a.method == "optimise") {
    settings["steps"] = a.steps;
    settings["rate"] = a.rate;
    settings["penalty"] = a.penalty;
    settings["mixing"] = a.mixing;
    settings["reduction"] = a.reduction;
  } else {
    settings["samples"] = a.samples;
  }
  if (a.method == "profile") settings["profile"] = a.profile;
  return settings;
}

reference::GateTraining training_of(const DuoSettings& a) {
  return {.steps = a.steps,
          .rate = a.rate,
          .penalty = a.penalty,
          .initial = 1.0,
          .streaming = mask_of(a),
          .mixing =
              a.mixing == "mixed" ? reference::Mixing::full_of_mixed : reference::Mixing::full_of_unmodified,
          .reduction = a.reduction == "sum" ? reference::Reduction::sum : reference::Reduction::mean,
          .objective = objective_of(a)};
}

}  // namespace kvpolicy::tools
