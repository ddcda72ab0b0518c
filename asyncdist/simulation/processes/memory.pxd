cdef extern from *:
    """
    #if defined(__linux__)
    #include <stdint.h>
    #include <sys/mman.h>

    #define HUGE_PAGE_NBYTES ((size_t)2 << 20)
    #define REGION_NBYTES ((size_t)64 << 20)

    /* Python's usual allocator of arenas, and the unused part of the last region of huge pages. */
    static PyObjectArenaAllocator usual_allocator;
    static char *unused, *unused_end;

    /* Returns memory that the usual allocator can free, because it also maps anonymous private pages. */
    static void *allocate_in_huge_pages(void *context, size_t nbytes) {
        char *found;
        if ((size_t)(unused_end - unused) < nbytes) {
            char *region = nbytes > REGION_NBYTES ? (char *)MAP_FAILED : (char *)mmap(
                NULL, REGION_NBYTES + HUGE_PAGE_NBYTES, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (region == (char *)MAP_FAILED)
                return usual_allocator.alloc(context, nbytes);
            unused = (char *)(((uintptr_t)region + HUGE_PAGE_NBYTES - 1) & ~(uintptr_t)(HUGE_PAGE_NBYTES - 1));
            unused_end = unused + REGION_NBYTES;
            (void)madvise(unused, REGION_NBYTES, MADV_HUGEPAGE);
        }
        found = unused;
        unused += nbytes;
        return found;
    }

    static void begin_huge_pages(void) {
        PyObjectArenaAllocator allocator;
        PyObject_GetArenaAllocator(&usual_allocator);
        allocator = usual_allocator;
        allocator.alloc = allocate_in_huge_pages;
        PyObject_SetArenaAllocator(&allocator);
    }

    static void end_huge_pages(void) {
        PyObject_SetArenaAllocator(&usual_allocator);
    }
    #else
    static void begin_huge_pages(void) {}
    static void end_huge_pages(void) {}
    #endif
    """
    void begin_huge_pages()
    void end_huge_pages()
