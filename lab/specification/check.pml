/* Every order of idempotency.pml within bounds: all that the specification leaves open is chosen freely. */
#ifndef ACTORS              /* all five, or these: */
#define ACTORS 3
#define FAULTS 1            /* of requests, and what a store forgets; deaths and ends of leases are not counted */
#define FORGETFUL 0         /* whether the store may lose what is not finished, as in some fail-overs */
#define LIVENESS 0          /* whether the last delivery meets no fault; then it must end with an answer */
#define BROKEN NONE         /* or a mistake on purpose */
#endif
#define ANSWERED true
#define UNANSWERED faults && faulty -> faults--
#define a_nonce(n) (me * 100 + n)
#define a_token(r) (r.token -> r.token + 1 : highest + 1)        /* the time, or more than the last */
#define may_begin (begun == me - 1)                              /* all are alike: one order is enough */
#define may_look may_begin
#define may_act true
#define may_die faulty
#define may_land true
#define what_it_saw (expected == NONE -> NONE : seen.revision)    /* once it is forgotten, no revision comes back */
#define brings(arguments) if :: arguments = 0 :: arguments = 1 fi
#define few (ACTORS < 4)                                         /* of more, only what a verdict needs */
#define may_renew (few && writes == 1)
#define time_passes (BROKEN != ENDLESS_LEASE)
#define hold(condition, promise) if :: (condition) :: else -> printf("BROKEN: "); printf(promise); assert(false) fi

inline begin() {
  byte number;
  atomic {
    if :: kind = BARE :: few -> kind = STEP :: few -> kind = STEP_AT_MOST_ONCE :: few -> kind = COMMIT fi;
    if :: refuse = true :: few -> refuse = false fi; printm(kind); printf(", refuse %d\n", refuse);
    for (number : 1 .. ACTORS) {
      if :: few || number < ACTORS -> run Delivery(number, 0) :: few && number == ACTORS -> run Delivery(number, 1)
         :: number == ACTORS && !LIVENESS -> run Other(number) fi }
  }
}
