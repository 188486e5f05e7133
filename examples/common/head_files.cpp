// SPDX-License-Identifier: Apache-2.0
#include "head_files.hpp"

#include <system_error>

#include <kvpolicy/core/error.hpp>

#include "files.hpp"

namespace kvpolicy::tools {
namespace {

namespace fs = std::filesystem;

fs::path in_repository(const fs::path& model, const fs::path& name) {
  // A GGUF file is named after its model, too.
  const fs::path last = last_part(model.string());
  const fs::path own = last.extension() == ".gguf" ? last.stem() : last;
  return repository_path((fs::path{"reference_model/weights"} / own / name).string());
}

}  // namespace

fs::path head_file(const fs::path& model, const fs::path& name) {
  std::error_code ignored;
  const fs::path beside = model / name;
  if (fs::exists(beside, ignored)) return beside;
  fs::path kept = in_repository(model, name);
  return fs::exists(kept, ignored) ? kept : beside;
}

fs::path require_head_file(const fs::path& model, const fs::path& name) {
  fs::path found = head_file(model, name);
  std::error_code ignored;
  const bool gates = name == "duo";
  require<FormatError>(
      fs::exists(found, ignored), "nothing is known about the heads of ", model.string(), ": neither ",
      found.string(), " nor ", in_repository(model, name).string(), " is there. `identify_heads ",
      gates ? "duo" : "headkv", " --model ", model.string(), " --out ", found.string(),
      "` makes it. Plans that need nothing of the kind: full, int8, int4, "
      "int2, kivi4, kivi2, sink_recent, streaming_llm, chunk, quest, snapkv, adakv, pyramid, h2o, "
      "tova, keynorm, keydiff, kvzip, expected");
  return found;
}

}  // namespace kvpolicy::tools
