/* A CUDA driver without a GPU: the functions that launcher.h looks up.
 *
 * Every call appends one line of JSON to the file $FAKE_CUDA_LOG.  Other variables, all read at
 * each call: FAKE_CUDA_FAIL=function:code, FAKE_CUDA_CAPABILITY (90), FAKE_CUDA_SHARED (232448),
 * FAKE_CUDA_DEVICE (0), FAKE_CUDA_NO_CONTEXT (threads start without one) and FAKE_CUDA_PARAMS, the
 * sizes in bytes of the parameters of every kernel: "8,8,4".  Built with NVIDIA's own header.
 */
#define _DEFAULT_SOURCE
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda.h"

static __thread int has_context = 0;

static const char* setting(const char* name, const char* otherwise) {
  const char* value = getenv(name);
  return value && *value ? value : otherwise;
}

static void put(const char* text) {
  const char* path = getenv("FAKE_CUDA_LOG");
  int file = path ? open(path, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
  if (file < 0) return;
  if (write(file, text, strlen(text)) < 0) abort();
  close(file);
}

static CUresult result(const char* function) {
  const char* fail = setting("FAKE_CUDA_FAIL", "");
  size_t n = strlen(function);
  return strncmp(fail, function, n) == 0 && fail[n] == ':' ? (CUresult)atoi(fail + n + 1)
                                                           : CUDA_SUCCESS;
}

static char* hex(char* out, const void* data, size_t n) {
  size_t i;
  for (i = 0; i < n; ++i) out += sprintf(out, "%02x", ((const unsigned char*)data)[i]);
  return out;
}

CUresult cuDriverGetVersion(int* version) {
  *version = atoi(setting("FAKE_CUDA_VERSION", "13000"));
  return result("cuDriverGetVersion");
}

CUresult cuInit(unsigned flags) {
  char line[64];
  sprintf(line, "{\"call\": \"cuInit\", \"flags\": %u}\n", flags);
  put(line);
  return result("cuInit");
}

CUresult cuGetErrorName(CUresult code, const char** name) {
  static __thread char text[32];
  sprintf(text, "FAKE_ERROR_%d", (int)code);
  *name = code == 999 ? NULL : text;
  return code == 999 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult code, const char** text) {
  *text = code == 999 ? NULL : "words of the driver";
  return code == 999 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

CUresult cuCtxGetDevice(CUdevice* device) {
  if (!has_context && getenv("FAKE_CUDA_NO_CONTEXT")) return CUDA_ERROR_INVALID_CONTEXT;
  *device = atoi(setting("FAKE_CUDA_DEVICE", "0"));
  return result("cuCtxGetDevice");
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  char line[64];
  sprintf(line, "{\"call\": \"cuDevicePrimaryCtxRetain\", \"device\": %d}\n", device);
  put(line);
  *context = (CUcontext)0x77;
  return result("cuDevicePrimaryCtxRetain");
}

CUresult cuCtxSetCurrent(CUcontext context) {
  CUresult code = result("cuCtxSetCurrent");
  if (code == CUDA_SUCCESS) has_context = context == (CUcontext)0x77;
  return code;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  int capability = atoi(setting("FAKE_CUDA_CAPABILITY", "90"));
  (void)device;
  if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) *value = capability / 10;
  if (attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) *value = capability % 10;
  if (attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    *value = atoi(setting("FAKE_CUDA_SHARED", "232448"));
  return result("cuDeviceGetAttribute");
}

CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  char line[256];
  CUresult code = result("cuModuleLoadData");
  sprintf(line, "{\"call\": \"cuModuleLoadData\", \"magic\": \"%.3s\", \"misaligned\": %d}\n",
          (const char*)image + 1, (int)((size_t)image % 8));
  put(line);
  usleep(10000); /* time for other threads to come */
  if (code == CUDA_SUCCESS) *module = (CUmodule)image;
  return code;
}

CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  CUresult code = result("cuModuleGetFunction");
  (void)module;
  if (code == CUDA_SUCCESS) *function = (CUfunction)strdup(name);
  return code;
}

CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  char line[256];
  sprintf(line, "{\"call\": \"cuFuncSetAttribute\", \"entry\": \"%s\", \"name\": \"%s\", "
          "\"value\": %d}\n", (const char*)function,
          attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES ? "shared"
          : attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED ? "cluster" : "?",
          value);
  put(line);
  return result("cuFuncSetAttribute");
}

static char* print_attribute(char* at, const CUlaunchAttribute* a) {
  switch (a->id) {
    case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
      return at + sprintf(at, "\"cooperative\": %d", a->value.cooperative);
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
      return at + sprintf(at, "\"cluster\": [%u, %u, %u]", a->value.clusterDim.x,
                          a->value.clusterDim.y, a->value.clusterDim.z);
    case CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE:
      return at + sprintf(at, "\"spread\": %d", a->value.clusterSchedulingPolicyPreference ==
                                                   CU_CLUSTER_SCHEDULING_POLICY_SPREAD);
    case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
      return at + sprintf(at, "\"dependent\": %d",
                          a->value.programmaticStreamSerializationAllowed);
    default:
      return at + sprintf(at, "\"unknown %d\": 0", (int)a->id);
  }
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** params,
                          void** extra) {
  char line[16384], *at = line;
  const char* sizes = setting("FAKE_CUDA_PARAMS", "");
  unsigned i;
  at += sprintf(at, "{\"call\": \"cuLaunchKernelEx\", \"entry\": \"%s\", \"grid\": [%u, %u, %u], "
                "\"block\": [%u, %u, %u], \"shared\": %u, \"stream\": %zu, \"extra\": %d, "
                "\"attributes\": {", (const char*)function, c->gridDimX, c->gridDimY, c->gridDimZ,
                c->blockDimX, c->blockDimY, c->blockDimZ, c->sharedMemBytes, (size_t)c->hStream,
                extra != NULL);
  for (i = 0; i < c->numAttrs; ++i) {
    if (i) at += sprintf(at, ", ");
    at = print_attribute(at, &c->attrs[i]);
  }
  at += sprintf(at, "}, \"params\": [");
  for (i = 0; *sizes; ++i) {
    char* end;
    size_t n = strtoul(sizes, &end, 10);
    at += sprintf(at, i ? ", \"" : "\"");
    at = hex(at, params[i], n);
    at += sprintf(at, "\"");
    sizes = *end ? end + 1 : end;
  }
  sprintf(at, "]}\n");
  put(line);
  return result("cuLaunchKernelEx");
}

static char* print_numbers(char* at, const char* name, const void* data, int bytes, unsigned n) {
  unsigned i;
  at += sprintf(at, ", \"%s\": [", name);
  for (i = 0; i < n; ++i)
    at += sprintf(at, "%s%llu", i ? ", " : "", bytes == 8
                  ? (unsigned long long)((const cuuint64_t*)data)[i]
                  : (unsigned long long)((const cuuint32_t*)data)[i]);
  return at + sprintf(at, "]");
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                                void* base, const cuuint64_t* dims, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  char line[2048], *at = line;
  at += sprintf(at, "{\"call\": \"cuTensorMapEncodeTiled\", \"type\": %d, \"base\": %zu, "
                "\"misaligned\": %d, \"rest\": [%d, %d, %d], \"swizzle\": %d", (int)type,
                (size_t)base, (int)((size_t)map % 64), (int)interleave, (int)promotion, (int)fill,
                (int)swizzle);
  at = print_numbers(at, "dims", dims, 8, rank);
  at = print_numbers(at, "strides", strides, 8, rank - 1);
  at = print_numbers(at, "box", box, 4, rank);
  at = print_numbers(at, "steps", steps, 4, rank);
  sprintf(at, "}\n");
  put(line);
  memset(map, 0xab, sizeof *map);
  return result("cuTensorMapEncodeTiled");
}
