/* A stand-in for libnvidia-ml.so.1, so that the real binding and its structures are what the tests run.
 *
 * What it answers stands in the file that FAKE_NVML names, read anew at each call: lines of key=value.
 *   count=2                          devices
 *   gpu0.uuid= .name= .bus_id= .total= .reserved= .free= .used= .mig=1 .processes=123:4096:1,124:0
 *   gpu0.mig0.uuid= ...              the same of its slices, with .instance= and the parent's .slices= places
 *   nvmlInitWithFlags=18             an NVML error code for a function, or "hang": it waits until the file changes
 *   nvmlDeviceGetMemoryInfo_v2.gpu0=3   the same for one device, or one slice (.gpu0.mig1)
 * Compiled with -DOLD_DRIVER it lacks the functions that came with driver 510 and later.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { SUCCESS = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7 };

struct device {
    int gpu, slice; /* slice -1: the device itself */
};

#define GPUS 16
#define SLICES 8
static struct device table[GPUS][SLICES + 1];

/* The value of a key, in `value`; 0 where there is none. */
static int look(const char *key, char *value, size_t size) {
    const char *path = getenv("FAKE_NVML");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[65536];
    int found = 0;
    if (!file) return 0;
    while (fgets(line, sizeof line, file)) {
        char *equals = strchr(line, '=');
        if (!equals) continue;
        *equals = 0;
        if (strcmp(line, key)) continue;
        equals[1 + strcspn(equals + 1, "\n")] = 0;
        snprintf(value, size, "%s", equals + 1);
        found = 1;
    }
    fclose(file);
    return found;
}

static int fault(const char *function, const char *who) {
    char key[256], value[64];
    for (;;) {
        snprintf(key, sizeof key, "%s.%s", function, who);
        if (!look(key, value, sizeof value) && !look(function, value, sizeof value)) return SUCCESS;
        if (strcmp(value, "hang")) return atoi(value);
        usleep(5000);
    }
}

static void name_of(const struct device *device, char *who, size_t size) {
    if (device->slice < 0)
        snprintf(who, size, "gpu%d", device->gpu);
    else
        snprintf(who, size, "gpu%d.mig%d", device->gpu, device->slice);
}

static int text(const struct device *device, const char *what, char *value, size_t size) {
    char who[64], key[128];
    name_of(device, who, sizeof who);
    snprintf(key, sizeof key, "%s.%s", who, what);
    return look(key, value, size);
}

static unsigned long long number(const struct device *device, const char *what, unsigned long long other) {
    char value[64];
    return text(device, what, value, sizeof value) ? strtoull(value, NULL, 10) : other;
}

#define ASK(device)                                      \
    do {                                                 \
        char who_[64];                                   \
        int code_;                                       \
        name_of(device, who_, sizeof who_);              \
        if ((code_ = fault(__func__, who_))) return code_; \
    } while (0)

int nvmlInitWithFlags(unsigned flags) { (void)flags; return fault(__func__, "any"); }
int nvmlShutdown(void) { return fault(__func__, "any"); }

const char *nvmlErrorString(int code) {
    static char text[64];
    if (code == 31337) return "\xff\xfe"; /* no text */
    snprintf(text, sizeof text, "error %d of the stand-in", code);
    return text;
}

int nvmlSystemGetDriverVersion(char *version, unsigned length) {
    int code = fault(__func__, "any");
    if (!code) snprintf(version, length, "999.1");
    return code;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    char value[64];
    int code = fault(__func__, "any");
    if (!code) *count = look("count", value, sizeof value) ? (unsigned)atoi(value) : 0;
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **device) {
    if (index >= GPUS) return INVALID_ARGUMENT;
    table[index][0].gpu = (int)index;
    table[index][0].slice = -1;
    ASK(&table[index][0]);
    *device = &table[index][0];
    return SUCCESS;
}

static int copy(struct device *device, const char *what, char *value, unsigned length) {
    return text(device, what, value, length) ? SUCCESS : NOT_SUPPORTED;
}

int nvmlDeviceGetUUID(struct device *device, char *uuid, unsigned length) {
    ASK(device);
    return copy(device, "uuid", uuid, length);
}

int nvmlDeviceGetName(struct device *device, char *name, unsigned length) {
    ASK(device);
    return copy(device, "name", name, length);
}

struct pci {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(struct device *device, struct pci *pci) {
    ASK(device);
    memset(pci, 0, sizeof *pci);
    return copy(device, "bus_id", pci->bus_id, sizeof pci->bus_id);
}

struct memory {
    unsigned long long total, free, used;
};

int nvmlDeviceGetMemoryInfo(struct device *device, struct memory *memory) {
    ASK(device);
    memory->total = number(device, "total", 0);
    memory->free = number(device, "free", 0);
    /* Version 1 counts what is reserved as used. */
    memory->used = number(device, "used", 0) + number(device, "reserved", 0);
    return SUCCESS;
}

static int gather(struct device *device, const char *what, unsigned *count, unsigned char *entries);

#ifndef OLD_DRIVER
struct memory_v2 {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

int nvmlDeviceGetMemoryInfo_v2(struct device *device, struct memory_v2 *memory) {
    ASK(device);
    if (memory->version != (sizeof *memory | 2u << 24)) return 25; /* NVML_ERROR_ARGUMENT_VERSION_MISMATCH */
    memory->total = number(device, "total", 0);
    memory->reserved = number(device, "reserved", 0);
    memory->free = number(device, "free", 0);
    memory->used = number(device, "used", 0);
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(struct device *device, unsigned *count, void *entries) {
    ASK(device);
    return gather(device, "processes", count, entries);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(struct device *device, unsigned *count, void *entries) {
    ASK(device);
    return gather(device, "graphics", count, entries);
}

int nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending) {
    ASK(device);
    if (device->slice >= 0) return NOT_SUPPORTED;
    *current = *pending = (unsigned)number(device, "mig", 0);
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned *count) {
    ASK(device);
    *count = (unsigned)number(device, "slices", 0);
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *parent, unsigned index, struct device **device) {
    char uuid[128];
    if (index >= SLICES) return INVALID_ARGUMENT;
    struct device *one = &table[parent->gpu][index + 1];
    one->gpu = parent->gpu;
    one->slice = (int)index;
    ASK(one);
    if (!text(one, "uuid", uuid, sizeof uuid)) return NOT_FOUND; /* an empty place */
    *device = one;
    return SUCCESS;
}

int nvmlDeviceGetGpuInstanceId(struct device *device, unsigned *id) {
    ASK(device);
    *id = (unsigned)number(device, "instance", 0);
    return SUCCESS;
}
#endif

int nvmlDeviceGetComputeRunningProcesses_v2(struct device *device, unsigned *count, void *entries) {
    ASK(device);
    return gather(device, "processes", count, entries);
}

struct process {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

static int gather(struct device *device, const char *what, unsigned *count, unsigned char *entries) {
    char value[65536], *rest = value, *one;
    unsigned found = 0, room = *count;
    struct process *into = (struct process *)entries;
    if (!text(device, what, value, sizeof value)) value[0] = 0;
    while ((one = strsep(&rest, ",")) && *one) {
        unsigned pid, instance = 0xFFFFFFFFu;
        unsigned long long used = ~0ULL; /* not available */
        if (sscanf(one, "%u:%llu:%u", &pid, &used, &instance) < 1) continue;
        if (found < room && into)
            into[found] = (struct process){pid, used, instance, 0xFFFFFFFFu};
        found++;
    }
    *count = found;
    return found > room || (found && !into) ? INSUFFICIENT_SIZE : SUCCESS;
}
