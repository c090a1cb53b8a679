"""System call numbers by machine: the calls that a program in the sandbox may make, and the few that are looked into.

The numbers are the kernel's interface and never change. A machine that is not listed has no filter, and the sandbox
says so instead of running without one.
"""

from __future__ import annotations


def _parse(table: str) -> dict[str, int]:
    return {name: int(number) for name, number in (entry.split("=") for entry in table.split())}


ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The audit number of each machine: a filter must refuse calls that were made in another machine's numbers."""

NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": _parse("""
    access=21 alarm=37 arch_prctl=158 brk=12 chdir=80 chmod=90 clock_getres=229 clock_gettime=228
    clock_nanosleep=230 clone=56 clone3=435 close=3 close_range=436 copy_file_range=326 creat=85 dup=32 dup2=33
    dup3=292 epoll_create=213 epoll_create1=291 epoll_ctl=233 epoll_pwait=281 epoll_pwait2=441 epoll_wait=232
    eventfd=284 eventfd2=290 execve=59 execveat=322 exit=60 exit_group=231 faccessat=269 faccessat2=439
    fadvise64=221 fallocate=285 fchdir=81 fchmod=91 fchmodat=268 fchmodat2=452 fcntl=72 fdatasync=75 fgetxattr=193
    flistxattr=196 fork=57 fstat=5 fstatfs=138 fsync=74 ftruncate=77 futex=202 futex_waitv=449
    get_robust_list=274 getcpu=309 getcwd=79 getdents=78 getdents64=217 getegid=108 geteuid=107 getgid=104
    getgroups=115 getitimer=36 getpeername=52 getpgid=121 getpgrp=111 getpid=39 getppid=110 getpriority=140
    getrandom=318 getresgid=120 getresuid=118 getrlimit=97 getrusage=98 getsid=124 getsockname=51 getsockopt=55
    gettid=186 gettimeofday=96 getuid=102 getxattr=191 ioctl=16 kill=62 lgetxattr=192 link=86 linkat=265
    listxattr=194 llistxattr=195 lseek=8 lstat=6 madvise=28 membarrier=324 mincore=27 mkdir=83 mkdirat=258 mmap=9
    mprotect=10 mremap=25 msync=26 munmap=11 nanosleep=35 newfstatat=262 open=2 openat=257 pause=34 pipe=22
    pipe2=293 poll=7 ppoll=271 prctl=157 pread64=17 preadv=295 preadv2=327 prlimit64=302 pselect6=270 pwrite64=18
    pwritev=296 pwritev2=328 read=0 readlink=89 readlinkat=267 readv=19 recvfrom=45 rename=82
    renameat=264 renameat2=316 restart_syscall=219 rmdir=84 rseq=334 rt_sigaction=13 rt_sigpending=127
    rt_sigprocmask=14 rt_sigreturn=15 rt_sigsuspend=130 rt_sigtimedwait=128 sched_get_priority_max=146
    sched_get_priority_min=147 sched_getaffinity=204 sched_getattr=315 sched_getparam=143 sched_getscheduler=145
    sched_yield=24 select=23 sendfile=40 sendto=44 set_robust_list=273 set_tid_address=218 setitimer=38
    setpgid=109 shutdown=48 sigaltstack=131 socketpair=53 splice=275 stat=4 statfs=137 statx=332
    symlink=88 symlinkat=266 sync_file_range=277 sysinfo=99 tee=276 tgkill=234 time=201 timer_create=222
    timer_delete=226 timer_getoverrun=225 timer_gettime=224 timer_settime=223 timerfd_create=283 timerfd_gettime=287
    timerfd_settime=286 times=100 tkill=200 truncate=76 umask=95 uname=63 unlink=87 unlinkat=263 utime=132
    utimensat=280 utimes=235 vfork=58 wait4=61 waitid=247 write=1 writev=20
    """),
    "aarch64": _parse("""
    brk=214 chdir=49 clock_getres=114 clock_gettime=113 clock_nanosleep=115 clone=220 clone3=435 close=57
    close_range=436 copy_file_range=285 dup=23 dup3=24 epoll_create1=20 epoll_ctl=21 epoll_pwait=22 epoll_pwait2=441
    eventfd2=19 execve=221 execveat=281 exit=93 exit_group=94 faccessat=48 faccessat2=439 fadvise64=223 fallocate=47
    fchdir=50 fchmod=52 fchmodat=53 fchmodat2=452 fcntl=25 fdatasync=83 fgetxattr=10 flistxattr=13 fstat=80
    fstatfs=44 fsync=82 ftruncate=46 futex=98 futex_waitv=449 get_robust_list=100 getcpu=168 getcwd=17 getdents64=61
    getegid=177 geteuid=175 getgid=176 getgroups=158 getitimer=102 getpeername=205 getpgid=155 getpid=172
    getppid=173 getpriority=141 getrandom=278 getresgid=150 getresuid=148 getrlimit=163 getrusage=165 getsid=156
    getsockname=204 getsockopt=209 gettid=178 gettimeofday=169 getuid=174 getxattr=8 ioctl=29 kill=129 lgetxattr=9
    linkat=37 listxattr=11 llistxattr=12 lseek=62 madvise=233 membarrier=283 mincore=232 mkdirat=34 mmap=222
    mprotect=226 mremap=216 msync=227 munmap=215 nanosleep=101 newfstatat=79 openat=56 pipe2=59 ppoll=73 prctl=167
    pread64=67 preadv=69 preadv2=286 prlimit64=261 pselect6=72 pwrite64=68 pwritev=70 pwritev2=287 read=63
    readlinkat=78 readv=65 recvfrom=207 renameat=38 renameat2=276 restart_syscall=128 rseq=293
    rt_sigaction=134 rt_sigpending=136 rt_sigprocmask=135 rt_sigreturn=139 rt_sigsuspend=133 rt_sigtimedwait=137
    sched_get_priority_max=125 sched_get_priority_min=126 sched_getaffinity=123 sched_getattr=275 sched_getparam=121
    sched_getscheduler=120 sched_yield=124 sendfile=71 sendto=206 set_robust_list=99 set_tid_address=96
    setitimer=103 setpgid=154 shutdown=210 sigaltstack=132 socketpair=199 splice=76 statfs=43 statx=291
    symlinkat=36 sync_file_range=84 sysinfo=179 tee=77 tgkill=131 timer_create=107 timer_delete=111
    timer_getoverrun=109 timer_gettime=108 timer_settime=110 timerfd_create=85 timerfd_gettime=87 timerfd_settime=86
    times=153 tkill=130 truncate=45 umask=166 uname=160 unlinkat=35 utimensat=88 wait4=260 waitid=95 write=64
    writev=66
    """),
}
