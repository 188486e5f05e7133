// SPDX-License-Identifier: Apache-2.0
#include "duo_checkpoint.hpp"

#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/text_file.hpp>

#include <common/files.hpp>
#include <common/json_line.hpp>

namespace kvpolicy::tools {
namespace {

io::Json rows_of(const HeadGates& gates) {
  io::Json rows = io::Json::array();
  for (std::size_t layer = 0; layer < gates.layers(); ++layer) {
    const auto row = gates.layer(layer);
    rows.push_back(std::vector<double>(row.begin(), row.end()));
  }
  return rows;
}

std::vector<double> numbers_of(const io::Json& json, const char* name, std::size_t count,
                               const std::string& path) {
  require<FormatError>(json.contains(name) && json[name].is_array() && json[name].size() == count, path, ": ",
                       name, " must be ", count, " numbers, one for each step made");
  std::vector<double> values;
  for (const io::Json& value : json[name]) {
    require<FormatError>(value.is_number(), path, ": ", name, " holds ", io::shown(value),
                         ", must hold numbers");
    values.push_back(value.get<double>());
  }
  return values;
}

HeadGates gates_of(const io::Json& json, const char* name, const std::string& path) {
  require<FormatError>(json.contains(name) && json[name].is_array() && !json[name].empty(), path, ": ", name,
                       " must be rows of numbers");
  const io::Json& rows = json[name];
  std::vector<double> values;
  for (const io::Json& row : rows) {
    require<FormatError>(row.is_array() && row.size() == rows[0].size(), path, ": the rows of ", name,
                         " must be arrays of one length");
    for (const io::Json& value : row) {
      require<FormatError>(value.is_number(), path, ": ", name, " holds ", io::shown(value),
                           ", must hold numbers");
      values.push_back(value.get<double>());
    }
  }
  return {rows.size(), rows[0].size(), std::move(values)};
}

}  // namespace

void save_checkpoint(const std::string& path, const DuoCheckpoint& checkpoint) {
  const reference::GateState& state = checkpoint.state;
  // JSON numbers are written with enough digits to read the same values back.
  const io::Json json = {{"step", state.step},
                         {"settings", checkpoint.settings},
                         {"losses", checkpoint.losses},
                         {"penalties", checkpoint.penalties},
                         {"gates", rows_of(state.gates)},
                         {"mean", rows_of(state.mean)},
                         {"square", rows_of(state.square)}};
  write_result(path, as_line(json, 1) + "\n");
}

DuoCheckpoint load_checkpoint(const std::string& path, const io::Json& settings) {
  const io::Json json = io::parse_json(io::read_text_file(path), path);
  require<FormatError>(json.is_object() && json.contains("step") && json["step"].is_number_unsigned() &&
                           json.contains("settings"),
                       path, ": is not a checkpoint of identify_heads");
  const io::Json& own = json["settings"];
  for (const auto& [name, value] : settings.items()) {
    require<FormatError>(own.contains(name) && own[name] == value, path, ": was made with ", name, " ",
                         own.contains(name) ? as_line(own[name]) : "unset", ", not ", as_line(value),
                         ": go on with the settings that it was begun with");
  }
  DuoCheckpoint checkpoint;
  checkpoint.settings = own;
  checkpoint.state.step = json["step"].get<std::size_t>();
  checkpoint.state.gates = gates_of(json, "gates", path);
  checkpoint.state.mean = gates_of(json, "mean", path);
  checkpoint.state.square = gates_of(json, "square", path);
  checkpoint.losses = numbers_of(json, "losses", checkpoint.state.step, path);
  checkpoint.penalties = numbers_of(json, "penalties", checkpoint.state.step, path);
  return checkpoint;
}

}  // namespace kvpolicy::tools
