// SPDX-License-Identifier: Apache-2.0
#include <identify/duo_checkpoint.hpp>

#include <string>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/text_file.hpp>

#include "support/temporary_folder.hpp"

using namespace kvpolicy;
using namespace kvpolicy::tools;

namespace {

DuoCheckpoint some_checkpoint() {
  DuoCheckpoint checkpoint;
  // Numbers without a short decimal form, tiny and negative ones.
  checkpoint.state = {.step = 2,
                      .gates = HeadGates{2, 2, {1.0 / 3.0, -1e-9, 1.0, 0.1 + 0.2}},
                      .mean = HeadGates{2, 2, {1e-300, 0.0, -0.7, 2.0 / 7.0}},
                      .square = HeadGates{2, 2, {5e-324, 1e-17, 0.1, 3.0}}};
  checkpoint.settings = {{"steps", 40}, {"loss", "distill"}};
  checkpoint.losses = {0.1, 1.0 / 3.0};
  checkpoint.penalties = {0.05, 0.049};
  return checkpoint;
}

}  // namespace

TEST_CASE("a checkpoint is read back bit for bit") {
  const testing::TemporaryFolder folder;
  const std::string path = (folder.path() / "made/here/checkpoint.json").string();
  const DuoCheckpoint saved = some_checkpoint();
  save_checkpoint(path, saved);
  const DuoCheckpoint loaded = load_checkpoint(path, saved.settings);
  CHECK(loaded.state == saved.state);
  CHECK(loaded.losses == saved.losses);
  CHECK(loaded.penalties == saved.penalties);
}

TEST_CASE("a checkpoint of other settings is refused by name") {
  const testing::TemporaryFolder folder;
  const std::string path = (folder.path() / "checkpoint.json").string();
  DuoCheckpoint saved = some_checkpoint();
  save_checkpoint(path, saved);
  saved.settings["steps"] = 80;
  CHECK_THROWS_WITH_AS(static_cast<void>(load_checkpoint(path, saved.settings)),
                       doctest::Contains("was made with steps 40, not 80"), FormatError);
}

TEST_CASE("damaged checkpoints are refused") {
  const testing::TemporaryFolder folder;
  const std::string path = (folder.path() / "checkpoint.json").string();
  const io::Json settings = some_checkpoint().settings;
  const auto refused = [&](const std::string& text) {
    io::write_text_file(path, text);
    CHECK_THROWS_AS(static_cast<void>(load_checkpoint(path, settings)), FormatError);
  };
  CHECK_THROWS_AS(static_cast<void>(load_checkpoint(path, settings)), FormatError);  // there is no file
  save_checkpoint(path, some_checkpoint());
  const std::string whole = io::read_text_file(path);
  refused(whole.substr(0, whole.size() / 2));
  refused("[]");
  refused("{}");
  for (const char* name : {"step", "gates", "mean", "square", "losses", "penalties", "settings"}) {
    CAPTURE(name);
    io::Json json = io::parse_json(whole, "whole");
    json[name] = "x";
    refused(json.dump());
    json.erase(name);
    refused(json.dump());
  }
  io::Json ragged = io::parse_json(whole, "whole");
  ragged["gates"][0].push_back(0.5);
  refused(ragged.dump());
  io::Json few = io::parse_json(whole, "whole");
  few["losses"].erase(0);
  refused(few.dump());
}
