/* Measuring: which of several ways to compute a result is the fastest, at the first call.
 *
 * A range of sizes has candidates, each one or several launches.  The host code around them is
 *
 *   for (i = 0, n = rf_begin(range, count); i < n; ++i) switch (rf_next(range, i)) { launches }
 *
 * Where it is known which is the fastest on the current device, n is 1 and that one is run.  Where
 * it is not, each is run once to warm up and RF_SAMPLES times between two events, in turn, and the
 * fastest once more, since it is the one whose results shall be left.  All write the same outputs
 * and read none of them, so how often they run makes no difference.
 *
 * The first candidate, which is the best by its price, is run and nothing is measured while the
 * stream is captured, as events cannot be waited for then, while another thread measures the range,
 * and where the driver has no memory for events.
 */

#define RF_MAX_CANDIDATES 8
#define RF_SAMPLES 5               /* the least counts: whatever disturbs a kernel makes it slower */
#define RF_ENOUGH_MS 200.0f        /* of samples, behind which each candidate gets no further one */
#define RF_FLUSH_BYTES (256 << 20) /* written before a sample, so that weights come from memory */
#define RF_WARM_UP_MS 50.0f        /* of such writes before the first sample: an idle GPU is slow */
#define RF_WRITES 8                /* of them at a time */
#define RF_CAPTURE_RELAXED 2       /* CU_STREAM_CAPTURE_MODE_RELAXED */
#define RF_BEING_MEASURED (-1)

typedef struct {
  int32_t (*cuStreamIsCapturing)(void*, int32_t*);
  int32_t (*cuThreadExchangeStreamCaptureMode)(int32_t*);
  int32_t (*cuEventCreate)(void**, uint32_t);
  int32_t (*cuEventDestroy_v2)(void*);
  int32_t (*cuEventRecord)(void*, void*);
  int32_t (*cuEventSynchronize)(void*);
  int32_t (*cuEventElapsedTime)(float*, void*, void*);
  int32_t (*cuMemAlloc_v2)(uint64_t*, size_t);
  int32_t (*cuMemFree_v2)(uint64_t);
  int32_t (*cuMemsetD8Async)(uint64_t, unsigned char, size_t, void*);
} rf_event_api;

/* What is known of a range: by device 0, RF_BEING_MEASURED, or the number of the fastest plus 1. */
typedef struct {
  int32_t fastest[RF_MAX_DEVICES];
} rf_range;

typedef struct {
  const rf_range* measured; /* NULL where `chosen` is run and nothing is measured */
  int32_t device, count, chosen;
  int32_t running, warm; /* the candidate between the two events, -1: none; whether it counts */
  int32_t launched; /* whether any candidate had something to do */
  int32_t capture_mode;
  void *stream, *start, *stop;
  uint64_t flushed;
  float least_ms[RF_MAX_CANDIDATES], spent_ms;
  int32_t failed[RF_MAX_CANDIDATES];
  TVMFFIObjectHandle error; /* of the first launch that failed */
} rf_trial;

static rf_event_api rf_events;
static int rf_events_found = 0; /* 1: all functions, -1: not all; under the mutex */
static __thread rf_trial rf_trying;

/* Keep the error that was raised last if it is the first of the trial; raise none. */
static void rf_keep_error(rf_trial* trial) {
  TVMFFIObjectHandle error = NULL;
  TVMFFIErrorMoveFromRaised(&error);
  if (trial->error == NULL) {
    trial->error = error;
  } else if (error != NULL) {
    TVMFFIObjectDecRef(error);
  }
}

/* Take the outcome of a launch, 1 if its grid is empty; what is measured fails alone. */
RF_UNUSED static int rf_tried(int code) {
  rf_trial* trial = &rf_trying;
  if (trial->measured == NULL || trial->running < 0) return code < 0 ? -1 : 0;
  if (code == 0) trial->launched = 1;
  if (code >= 0) return 0;
  rf_keep_error(trial);
  trial->failed[trial->running] = 1;
  return 0;
}

static int rf_find_events(void) {
  int found;
  pthread_mutex_lock(&rf_mutex);
  if (rf_events_found == 0) {
    const char* missing = NULL;
#define RF_FIND(name) *(void**)(&rf_events.name) = rf_find(rf_driver_library, #name, &missing)
    RF_FIND(cuStreamIsCapturing);
    RF_FIND(cuThreadExchangeStreamCaptureMode);
    RF_FIND(cuEventCreate);
    RF_FIND(cuEventDestroy_v2);
    RF_FIND(cuEventRecord);
    RF_FIND(cuEventSynchronize);
    RF_FIND(cuEventElapsedTime);
    RF_FIND(cuMemAlloc_v2);
    RF_FIND(cuMemFree_v2);
    RF_FIND(cuMemsetD8Async);
#undef RF_FIND
    rf_events_found = missing == NULL ? 1 : -1;
  }
  found = rf_events_found;
  pthread_mutex_unlock(&rf_mutex);
  return found > 0;
}

static void rf_release(rf_trial* trial) {
  if (trial->flushed) rf_events.cuMemFree_v2(trial->flushed);
  if (trial->stop) rf_events.cuEventDestroy_v2(trial->stop);
  if (trial->start) rf_events.cuEventDestroy_v2(trial->start);
  if (trial->error) TVMFFIObjectDecRef(trial->error);
  rf_events.cuThreadExchangeStreamCaptureMode(&trial->capture_mode);
  trial->measured = NULL;
}

static void rf_flush(rf_trial* trial) {
  rf_events.cuMemsetD8Async(trial->flushed, 0, RF_FLUSH_BYTES, trial->stream);
}

/* Keep the device busy until its clock has risen; what fails here fails in the samples too. */
static void rf_warm_up(rf_trial* trial) {
  float spent_ms = 0.0f, ms = 0.0f;
  int i;
  for (; spent_ms < RF_WARM_UP_MS; spent_ms += ms > 0.125f ? ms : 0.125f) {
    rf_events.cuEventRecord(trial->start, trial->stream);
    for (i = 0; i < RF_WRITES; ++i) rf_flush(trial);
    rf_events.cuEventRecord(trial->stop, trial->stream);
    if (rf_events.cuEventSynchronize(trial->stop) ||
        rf_events.cuEventElapsedTime(&ms, trial->start, trial->stop)) {
      return;
    }
  }
}

/* Begin to measure; 0 where that cannot be. */
static int rf_prepare(rf_trial* trial) {
  int i;
  trial->start = trial->stop = NULL;
  trial->error = NULL;
  trial->flushed = 0;
  trial->running = -1;
  trial->launched = 0;
  trial->spent_ms = 0.0f;
  for (i = 0; i < trial->count; ++i) {
    trial->least_ms[i] = -1.0f;
    trial->failed[i] = 0;
  }
  /* Another thread may capture a stream of its own meanwhile. */
  trial->capture_mode = RF_CAPTURE_RELAXED;
  rf_events.cuThreadExchangeStreamCaptureMode(&trial->capture_mode);
  if (rf_events.cuEventCreate(&trial->start, 0) || rf_events.cuEventCreate(&trial->stop, 0)) {
    rf_release(trial);
    return 0;
  }
  /* Without room, weights may come from the cache: the same for all candidates. */
  if (rf_events.cuMemAlloc_v2(&trial->flushed, RF_FLUSH_BYTES)) trial->flushed = 0;
  if (trial->flushed) rf_warm_up(trial);
  return 1;
}

/* Return how often `rf_next` is to be called. */
static int rf_begin(rf_range* range, int64_t count, int64_t* calls) {
  rf_trial* trial = &rf_trying;
  int32_t known, capturing = 0;
  if (count < 1 || count > RF_MAX_CANDIDATES) {
    return rf_fail("measuring candidates", "a range has 1 to 8 of them");
  }
  *calls = 1;
  trial->measured = NULL;
  trial->chosen = 0;
  trial->count = (int32_t)count;
  if (rf_current_device("measuring candidates", &trial->device)) return -1;
  known = __atomic_load_n(&range->fastest[trial->device], __ATOMIC_ACQUIRE);
  if (known > 0) trial->chosen = known - 1;
  if (known != 0 || !rf_find_events()) return 0;
  trial->stream = TVMFFIEnvGetStream(kDLCUDA, trial->device);
  /* It fails on the legacy stream while another one is captured. */
  if (rf_events.cuStreamIsCapturing(trial->stream, &capturing) || capturing) return 0;
  if (!__atomic_compare_exchange_n(&range->fastest[trial->device], &known, RF_BEING_MEASURED, 0,
                                   __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
    return 0;
  }
  if (!rf_prepare(trial)) {
    __atomic_store_n(&range->fastest[trial->device], 0, __ATOMIC_RELEASE);
    return 0;
  }
  trial->measured = range;
  *calls = count * (1 + RF_SAMPLES) + 1;
  return 0;
}

/* End the sample that is being taken, if one is. */
static void rf_end_sample(rf_trial* trial) {
  int32_t code, n = trial->running;
  float ms = 0.0f;
  if (n < 0) return;
  if (!trial->failed[n]) {
    if ((code = rf_events.cuEventRecord(trial->stop, trial->stream)) ||
        (code = rf_events.cuEventSynchronize(trial->stop)) ||
        (code = rf_events.cuEventElapsedTime(&ms, trial->start, trial->stop))) {
      rf_fail_cuda("measuring candidates", "waiting for a candidate", code);
      rf_keep_error(trial);
      trial->failed[n] = 1;
    } else if (trial->warm) {
      trial->spent_ms += ms;
      if (trial->least_ms[n] < 0.0f || ms < trial->least_ms[n]) trial->least_ms[n] = ms;
    }
  }
  trial->running = -1;
}

/* Return the fastest candidate, or -1 and the first error where all failed.  Without elements
 * there is nothing to be fast at, and another call measures. */
static int rf_decide(rf_range* range, rf_trial* trial, int64_t* candidate) {
  int32_t i, best = -1;
  for (i = 0; i < trial->count; ++i) {
    if (trial->failed[i]) continue;
    if (best < 0 || trial->least_ms[i] < trial->least_ms[best]) best = i;
  }
  __atomic_store_n(&range->fastest[trial->device], trial->launched ? best + 1 : 0,
                   __ATOMIC_RELEASE);
  if (best < 0) {
    TVMFFIErrorSetRaised(trial->error);
    trial->error = NULL;
  }
  rf_release(trial);
  *candidate = best;
  return best < 0 ? -1 : 0;
}

/* Return which candidate to run in the `call`-th call since `rf_begin`; -1: none. */
static int rf_next(rf_range* range, int64_t call, int64_t* candidate) {
  rf_trial* trial = &rf_trying;
  int32_t n;
  *candidate = trial->chosen;
  if (trial->measured == NULL) return 0;
  rf_end_sample(trial);
  if (call == (int64_t)trial->count * (1 + RF_SAMPLES)) return rf_decide(range, trial, candidate);
  n = (int32_t)(call % trial->count);
  trial->warm = call >= trial->count;
  *candidate = -1;
  /* The first sample is taken of each, however long it takes. */
  if (call >= 2 * (int64_t)trial->count && trial->spent_ms > RF_ENOUGH_MS) return 0;
  if (trial->failed[n]) return 0;
  *candidate = trial->running = n;
  if (trial->flushed) rf_flush(trial);
  rf_events.cuEventRecord(trial->start, trial->stream);
  return 0;
}

/* Hand a number to the host code. */
static int rf_return(TVMFFIAny* result, int64_t value) {
  result->type_index = kTVMFFIInt;
  result->zero_padding = 0;
  result->v_int64 = value;
  return 0;
}
