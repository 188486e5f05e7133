// SPDX-License-Identifier: Apache-2.0
//
// Part of the stand-in for the CUDA runtime: streams, events and graphs.
#pragma once

#include <chrono>
#include <memory>
#include <utility>

#include "runtime_memory.hpp"

// ---- streams and events ----------------------------------------------------------------------
inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    *stream = d.create_stream(flags != cudaStreamNonBlocking);
    return cudaSuccess;
  });
}
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithFlags(stream, cudaStreamDefault);
}
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  auto& d = kvpolicy::gpu::simt::device();
  if (!d.knows(stream)) return d.answer(cudaErrorInvalidResourceHandle);
  d.destroy_stream(stream);
  return cudaSuccess;
}
/// Not one of the calls that fail on demand: who asks for an id does without one.
inline cudaError_t cudaStreamGetId(cudaStream_t handle, unsigned long long* id) {
  auto& d = kvpolicy::gpu::simt::device();
  CUstream_st* const stream = d.stream_of(handle);
  if (!d.knows(stream)) return d.answer(cudaErrorInvalidResourceHandle);
  *id = stream->number + 1;
  return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    CUstream_st* const stream = d.stream_of(handle);
    if (!d.knows(stream)) return cudaErrorInvalidResourceHandle;
    if (stream->capture != nullptr) {
      stream->capture->invalid = true;
      return cudaErrorStreamCaptureUnsupported;
    }
    d.note_wait();
    d.finish(*stream);
    return cudaSuccess;
  });
}
inline cudaError_t cudaStreamQuery(cudaStream_t handle) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    CUstream_st* const stream = d.stream_of(handle);
    if (!d.knows(stream)) return cudaErrorInvalidResourceHandle;
    if (stream->capture != nullptr) {
      stream->capture->invalid = true;
      return cudaErrorStreamCaptureUnsupported;
    }
    return stream->pending.empty() ? cudaSuccess : cudaErrorNotReady;
  });
}
inline cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  return kvpolicy::gpu::simt::call([=](auto& d) { return d.submit(stream, [=] { function(argument); }); });
}

inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return kvpolicy::gpu::simt::call([=](auto&) {
    *event = std::make_unique<CUevent_st>().release();
    return cudaSuccess;
  });
}
inline cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, cudaEventDefault);
}
inline cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete event;
  return cudaSuccess;
}
inline cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle = nullptr) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    CUstream_st* const stream = d.stream_of(handle);
    if (!d.knows(stream)) return cudaErrorInvalidResourceHandle;
    event->stream = stream;
    event->ticket = stream->submitted;
    event->capture = stream->capture;
    event->in_capture = stream->capture != nullptr;
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    event->milliseconds = std::chrono::duration<double, std::milli>(now).count();
    return cudaSuccess;
  });
}
inline cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    if (event->in_capture) return cudaErrorCapturedEvent;
    if (d.spoils_capture()) return cudaErrorStreamCaptureUnsupported;
    d.note_wait();
    if (event->stream != nullptr && d.knows(event->stream)) d.advance(*event->stream, event->ticket);
    return cudaSuccess;
  });
}
inline cudaError_t cudaEventQuery(cudaEvent_t event) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    if (event->in_capture) return cudaErrorCapturedEvent;
    if (d.spoils_capture()) return cudaErrorStreamCaptureUnsupported;
    const bool open =
        event->stream != nullptr && d.knows(event->stream) && event->stream->done < event->ticket;
    return open ? cudaErrorNotReady : cudaSuccess;
  });
}
inline cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t from, cudaEvent_t to) {
  return kvpolicy::gpu::simt::call([=](auto&) {
    if (from->stream == nullptr || to->stream == nullptr) return cudaErrorInvalidResourceHandle;
    *milliseconds = static_cast<float>(to->milliseconds - from->milliseconds);
    return cudaSuccess;
  });
}
inline cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned = 0) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    CUstream_st* const stream = d.stream_of(handle);
    if (!d.knows(stream)) return cudaErrorInvalidResourceHandle;
    if (event->in_capture) {
      // A second stream joins a capture by waiting for a captured event.
      if (stream->capture == nullptr) stream->capture = event->capture.lock();
      return cudaSuccess;
    }
    if (event->stream == nullptr || event->stream == stream) return cudaSuccess;
    return d.submit(stream, [&d, source = event->stream, ticket = event->ticket] {
      if (d.knows(source)) d.advance(*source, ticket);
    });
  });
}

// ---- graphs ----------------------------------------------------------------------------------
inline cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    CUstream_st* const stream = d.stream_of(handle);
    if (stream == &d.default_stream()) return cudaErrorStreamCaptureUnsupported;
    if (!d.knows(stream)) return cudaErrorInvalidResourceHandle;
    if (stream->capture != nullptr) return cudaErrorIllegalState;
    stream->capture = std::make_shared<kvpolicy::gpu::simt::Capture>();
    stream->capture->relaxed = mode == cudaStreamCaptureModeRelaxed;
    stream->began_capture = true;
    return cudaSuccess;
  });
}
/// The thread's own mode decides what it may call while it captures.
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    *mode = std::exchange(d.thread_mode, *mode);
    return cudaSuccess;
  });
}
inline cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    CUstream_st* const stream = d.stream_of(handle);
    if (!d.knows(stream)) return cudaErrorInvalidResourceHandle;
    *status = stream->capture == nullptr ? cudaStreamCaptureStatusNone
              : stream->capture->invalid ? cudaStreamCaptureStatusInvalidated
                                         : cudaStreamCaptureStatusActive;
    return cudaSuccess;
  });
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    *graph = nullptr;
    if (!d.knows(stream) || stream->capture == nullptr) return cudaErrorIllegalState;
    if (!stream->began_capture) return cudaErrorStreamCaptureUnmatched;
    const auto capture = stream->capture;
    stream->began_capture = false;
    for (CUstream_st* each : d.all_streams()) {
      if (each->capture == capture) each->capture = nullptr;
    }
    if (capture->invalid) return cudaErrorStreamCaptureInvalidated;
    *graph = std::make_unique<CUgraph_st>(CUgraph_st{std::move(capture->work)}).release();
    return cudaSuccess;
  });
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* executable, cudaGraph_t graph,
                                        unsigned long long = 0) {
  return kvpolicy::gpu::simt::call([=](auto&) {
    if (graph == nullptr) return cudaErrorInvalidValue;
    *executable = std::make_unique<CUgraphExec_st>(CUgraphExec_st{graph->work}).release();
    return cudaSuccess;
  });
}
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) {
  return kvpolicy::gpu::simt::call([=](auto& d) {
    if (executable == nullptr) return cudaErrorInvalidValue;
    for (const auto& work : executable->work) {
      if (const cudaError_t error = d.submit(stream, work)) return error;
    }
    return cudaSuccess;
  });
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) {
  delete executable;
  return cudaSuccess;
}
