// SPDX-License-Identifier: Apache-2.0
//
// Describes a transformer as far as a KV cache needs it: the heads, channels and window of each layer. In
// most models all layers are alike, and four numbers describe them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// Keys and values have a multiple of `head_dim_step` channels, at most `largest_head_dim`. A backend may
/// support fewer sizes; it refuses the others itself.
inline constexpr std::size_t head_dim_step = 8;
/// Enough for the latent keys of DeepSeek-V3: 512 channels and 64 rotated ones.
inline constexpr std::size_t largest_head_dim = 576;

/// One layer of a model.
struct LayerShape {
  std::size_t q_heads = 0;  ///< Query heads; a multiple of `kv_heads`.
  /// KV heads that the layer caches; 0: it has no cache (linear attention, Mamba).
  std::size_t kv_heads = 0;
  std::size_t head_dim = 0;   ///< Channels of a query and of a key.
  std::size_t value_dim = 0;  ///< Channels of a value and of an output; 0: as many as head_dim.
  std::size_t window = 0;     ///< Latest tokens that a query sees, its own included; 0: all.
  float softcap = 0.0F;       ///< Logits become softcap * tanh(logit / softcap); 0: no cap.
  /// The earlier layer whose cache this layer reads, in models that share caches between layers. Then
  /// `kv_heads` is 0, and `head_dim`, `value_dim` and `window` stay 0, because they are those of the other
  /// layer.
  std::optional<std::size_t> reads = {};

  /// Query heads that read one KV head of this layer's own cache.
  [[nodiscard]] constexpr std::size_t queries_per_kv() const { return q_heads / kv_heads; }
  friend constexpr bool operator==(const LayerShape&, const LayerShape&) = default;
};

/// The layers of a model. `ModelShape{.layers = 32, .q_heads = 32, .kv_heads = 8, .head_dim = 128}` has 32
/// layers that are all alike; `change(layer)` makes one differ. Layers are numbered as in the model, so a
/// layer without a cache has a number too.
struct ModelShape {
  std::size_t layers = 0;
  std::size_t q_heads = 0;   ///< Query heads of each layer; so are the next three numbers.
  std::size_t kv_heads = 0;  ///< Query head h reads KV head h / queries_per_kv().
  std::size_t head_dim = 0;
  std::size_t value_dim = 0;  ///< 0: as many as head_dim.
  /// Empty if all layers are alike. Otherwise it has one entry for each layer, and the four numbers above
  /// are not used.
  std::vector<LayerShape> per_layer = {};

  /// The shape of layer `number`, with its value_dim filled in. Requires number < layers.
  [[nodiscard]] constexpr LayerShape layer(std::size_t number) const {
    LayerShape own = per_layer.empty() ? common() : per_layer[number];
    if (own.value_dim == 0) own.value_dim = own.head_dim;
    return own;
  }
  /// The shape of layer `number`, to be changed: `shape.change(5).window = 1024`.
  /// @throws ConfigError if there is no such layer; std::bad_alloc
  [[nodiscard]] LayerShape& change(std::size_t number) {
    require(number < layers, "ModelShape: there is no layer ", number, ", the shape has ", layers);
    if (per_layer.empty()) per_layer.assign(layers, common());
    return per_layer[number];
  }
  /// The layer whose cache layer `number` reads: itself, or the one that it names.
  [[nodiscard]] constexpr std::size_t cache_of(std::size_t number) const {
    return per_layer.empty() ? number : per_layer[number].reads.value_or(number);
  }

  /// Query heads for each KV head, for models whose layers are alike. For a layer of any model, use
  /// `layer(number).queries_per_kv()`.
  [[nodiscard]] constexpr std::size_t queries_per_kv() const { return q_heads / kv_heads; }
  /// KV heads of all layers together.
  [[nodiscard]] constexpr std::size_t kv_head_count() const {
    if (per_layer.empty()) return layers * kv_heads;
    std::size_t count = 0;
    for (const LayerShape& own : per_layer) count += own.kv_heads;
    return count;
  }
  /// Whether all layers are alike, have no window and no shared cache, and have keys and values with the
  /// same number of channels.
  [[nodiscard]] constexpr bool is_uniform() const {
    const LayerShape first = layers == 0 ? LayerShape{} : layer(0);
    if (first.window != 0 || first.softcap != 0.0F || first.value_dim != first.head_dim) return false;
    for (std::size_t i = 0; i < per_layer.size(); ++i) {
      if (layer(i) != first) return false;
    }
    return true;
  }

  friend constexpr bool operator==(const ModelShape& a, const ModelShape& b) {
    if (a.layers != b.layers) return false;
    const std::size_t described = a.per_layer.empty() && b.per_layer.empty() ? 1 : a.layers;
    for (std::size_t i = 0; i < std::min(a.layers, described); ++i) {
      if (a.layer(i) != b.layer(i)) return false;
    }
    return true;
  }

  /// Checks the shape. @throws ConfigError for no layers, no KV heads at all, a number of heads or channels
  /// that no layer can have, or a layer that reads the cache of a layer without one
  void validate() const {
    require(layers > 0 && layers <= most, "ModelShape: layers is ", layers, ", must be 1 to ", most);
    require(per_layer.empty() || per_layer.size() == layers, "ModelShape: per_layer has ", per_layer.size(),
            " entries, must have one for each of ", layers, " layers, or none");
    if (per_layer.empty()) {
      require(kv_heads > 0, "ModelShape: kv_heads is 0, must be 1 to ", most);
      return validate(layer(0), "");
    }
    for (std::size_t i = 0; i < layers; ++i) validate(i);
    require(kv_head_count() > 0, "ModelShape: none of ", layers, " layers has a KV head");
  }

 private:
  static constexpr std::size_t most = std::size_t{1} << 20;  // far above any model; products cannot overflow

  // The layer that the four numbers describe.
  [[nodiscard]] constexpr LayerShape common() const {
    return {.q_heads = q_heads, .kv_heads = kv_heads, .head_dim = head_dim, .value_dim = value_dim};
  }

  void validate(std::size_t number) const {
    const LayerShape& own = per_layer[number];
    std::string where = message("layer ", number, ": ");
    if (!own.reads) return validate(layer(number), where);
    require(*own.reads < number, "ModelShape: ", where, "reads the cache of layer ", *own.reads,
            ", must be an earlier layer");
    const LayerShape source = layer(*own.reads);
    require(source.kv_heads > 0, "ModelShape: ", where, "reads the cache of layer ", *own.reads,
            ", which has none of its own");
    require(own.kv_heads == 0 && own.head_dim == 0 && own.value_dim == 0 && own.window == 0,
            "ModelShape: ", where, "reads the cache of layer ", *own.reads,
            ", so its kv_heads, head_dim, value_dim and window must be 0");
    check_q_heads(own.q_heads, source.kv_heads, where);
    check_softcap(own.softcap, where);
  }

  static void validate(const LayerShape& own, const std::string& where) {
    require(own.kv_heads <= most, "ModelShape: ", where, "kv_heads is ", own.kv_heads, ", must be at most ",
            most);
    check_softcap(own.softcap, where);
    require(own.window <= std::size_t{1} << 40, "ModelShape: ", where, "window is ", own.window,
            ", must be at most 2^40; 0 is no window");
    if (own.kv_heads == 0) return;  // the layer has no cache, so nothing else matters
    check_q_heads(own.q_heads, own.kv_heads, where);
    check_channels("head_dim", own.head_dim, where);
    check_channels("value_dim", own.value_dim, where);
  }
  static void check_q_heads(std::size_t q_heads, std::size_t kv_heads, const std::string& where) {
    require(q_heads > 0 && q_heads <= most && q_heads % kv_heads == 0, "ModelShape: ", where, "q_heads is ",
            q_heads, ", must be a positive multiple of kv_heads = ", kv_heads);
  }
  static void check_channels(const char* name, std::size_t channels, const std::string& where) {
    require(channels > 0 && channels % head_dim_step == 0 && channels <= largest_head_dim,
            "ModelShape: ", where, name, " is ", channels, ", must be a multiple of ", head_dim_step,
            " from ", head_dim_step, " to ", largest_head_dim);
  }
  static void check_softcap(float softcap, const std::string& where) {
    require(is_finite(softcap) && softcap >= 0.0F, "ModelShape: ", where, "softcap is ", softcap,
            ", must be 0 or positive");
  }
};

}  // namespace kvpolicy
