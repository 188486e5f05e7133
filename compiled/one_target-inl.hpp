// SPDX-License-Identifier: Apache-2.0
//
// Wraps cpu::Engine as an AnyEngine for the one target that the including file names. Highway includes
// this file once for each of its targets; it is empty for all but one. (With all targets in one file,
// as is usual with Highway, that file would take more than a minute and 1 GB to compile.)
#include <hwy/highway.h>

#if HWY_TARGET == KVPOLICY_COMPILED_TARGET
// What other files of the library declare, this one compiles.
#undef KVPOLICY_SEPARATE_COMPILATION
#include <kvpolicy/cpu/engine.hpp>

namespace kvpolicy::compiled::detail {
namespace HWY_NAMESPACE {

class EngineOnTarget final : public AnyEngine {
 public:
  EngineOnTarget(std::string_view name, const AnyParallelFor& pool) : AnyEngine{name}, engine_{pool} {}

  [[nodiscard]] std::unique_ptr<AnyEngine> copy() const override {
    return std::make_unique<EngineOnTarget>(*this);
  }
  void attend_all(std::span<const LayerAttention> works) override { engine_.attend_all(works); }
  void observe(const LayerObservation& work) override { engine_.observe(work); }
  void score(const Plane& rows, std::span<const float> query, std::span<float> out) override {
    engine_.score(rows, query, out);
  }
  void bound(const LayerBounds& work) override { engine_.bound(work); }

 private:
  cpu::Engine<AnyParallelFor> engine_;
};

}  // namespace HWY_NAMESPACE

std::unique_ptr<AnyEngine> KVPOLICY_COMPILED_MAKE(std::string_view name, const AnyParallelFor& pool) {
  return std::make_unique<HWY_NAMESPACE::EngineOnTarget>(name, pool);
}

}  // namespace kvpolicy::compiled::detail
#endif
