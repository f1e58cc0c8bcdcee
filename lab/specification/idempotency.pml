/* One effect, whatever happens, over a store that can do one thing: compare and swap.

   An operation has one record. Its message is delivered several times, at once and again; others look once and write
   once. Whoever acts may die at any moment; a request may get lost, lose its reply, or land at any later time; a lease
   may end at any moment, also under a living owner. What must hold all the same stands in `hold`, by name.
   All of it is tried by:  spin -a idempotency.pml && gcc -O2 -DSAFETY -o pan pan.c && ./pan
   With -DTRACE the actors do what those of the production code did, if they may. */
#ifdef TRACE
#include "trace.pml"        /* what is left open is decided by what the production code did, */
#else
#include "check.pml"        /* or everything is tried */
#endif
#define NONE 0              /* no record, no step, no owner */
mtype = { NO_REVISION, NO_WAITING, NO_OWNER, NO_COUNT,           /* the mistakes */
          LIVE_RETENTION, NO_FINGERPRINT, NO_DOUBT, HASTY_VERDICT, ENDLESS_LEASE }
mtype = { IN_PROGRESS, COMPLETED, FAILED, RELEASED, UNKNOWN }
mtype = { BEGUN, FINISHED }; mtype = { BARE, STEP, STEP_AT_MOST_ONCE, COMMIT }
/* What is left open:
   may_...                 whether it happens now: a beginning, a look, an effect, a renewal, a death, a loss
   ANSWERED, UNANSWERED    whether the sender of a request hears what is stored after it
   a_nonce, a_token        what nobody has had, and a number larger than any that was had
   what_it_saw, hold       the revision that a write goes on from; a condition that must be true: a promise
   What a delivery knows: seen, the record; new, what it asks for; expected, the revision to be replaced; writes, how many
   it has asked for; used, how many of them may be stored, now or later: the nonce of a claim that lost is taken again. */
typedef Record {
  mtype status, step;
  short revision;           /* a nonce of one write; all that a swap compares */
  byte owner;               /* a nonce of the attempt that claimed it */
  byte token, takeovers;    /* for fencing; attempts in a row that never ended */
  byte arguments, result;   /* the fingerprint; whose it is: no two attempts have the same */
  bool over };              /* the time is: of a claim the lease, of an outcome the retention */
Record store, nothing; chan late = [2] of { short, Record };     /* requests that nobody waits for any more */
mtype kind = BARE;          /* how the body has its effect */
bool refuse;                /* on_takeover: what may have begun does not begin again */
byte most = 1;              /* takeovers in a row; after that the outcome is UNKNOWN */
byte effects[2], reported[2], highest, begun, underway, faults = FAULTS;         /* known to nobody: for the promises */
bool alive[ACTORS + 1], answered_last, arrives; byte beginner;   /* of the step on record */

#define author(r)    (r.revision / 100)                          /* 0: no delivery */
#define outcome(r)   (r.status == COMPLETED || r.status == FAILED)
#define absent(r)    (r.status == NONE || outcome(r) && r.over)
#define unbound(r)   (r.status == RELEASED && r.step == NONE)    /* it had no effect that anybody recorded */
#define others(r)    (!absent(r) && !unbound(r) && r.arguments != arguments && BROKEN != NO_FINGERPRINT)
#define running(r)   (r.status == IN_PROGRESS && !r.over)
#define may_rerun(r) (!refuse && r.takeovers < most)
#define is_claim(r)  (r.status == IN_PROGRESS && r.owner != store.owner)
#define doubt        (seen.step == BEGUN && !began)              /* an earlier attempt may have had the effect */
#define faulty       (!LIVENESS || me != ACTORS)
inline copy(a, b) { d_step { b.status = a.status; b.revision = a.revision; b.owner = a.owner; b.token = a.token;
  b.takeovers = a.takeovers; b.arguments = a.arguments; b.step = a.step; b.result = a.result; b.over = a.over } }

inline happen(which) {      /* the effect, in the world outside */
  hold(kind != COMMIT || !effects[which], "what is committed with the record happens once");
  hold(FORGETFUL || !(refuse || kind == STEP_AT_MOST_ONCE) || !effects[which], "what must not be repeated happens once");
  effects[which] = 1 }
inline report(r) {          /* to whoever waits for it */
  printf("  and reports the result of %d\n", r.result);
  hold(r.arguments == arguments, "nobody gets the result of other arguments");
  hold(effects[arguments] || r.status == FAILED, "no result without an effect");
  hold(!reported[arguments] || reported[arguments] == r.result, "all get the same result");
  reported[arguments] = r.result }
inline swap(expected, new) {                                     /* all that a store does */
  if
  :: store.revision == expected || BROKEN == NO_REVISION && expected != NONE ->
     hold(!outcome(store) || store.over, "an outcome is final");
     hold(new.status != FAILED || store.step != BEGUN || beginner == new.owner, "no failure is told while in doubt");
     beginner = (new.step != BEGUN -> NONE : (store.step == BEGUN -> beginner : new.owner));
     hold(store.status != UNKNOWN || !author(new) || author(new) == store.owner && outcome(new),
          "UNKNOWN is left by a verdict, or by its owner's outcome");
     hold(!is_claim(new) || FORGETFUL || !running(store), "a takeover waits for the lease");
     hold(!is_claim(new) || FORGETFUL || new.token > highest, "the fencing token grows with every claim");
     hold(!is_claim(new) || store.status != IN_PROGRESS || new.takeovers == store.takeovers + 1 && new.takeovers <= most,
          "takeovers are counted, and limited");
     hold(is_claim(new) || absent(store) || !author(new) || new.owner == store.owner, "a revision has one owner");
     hold(!outcome(new) && new.status != RELEASED || !author(new) || author(new) == new.owner, "its owner ends a claim");
     hold(absent(store) || unbound(store) || new.arguments == store.arguments, "arguments that bind a key keep it");
     if :: kind == COMMIT && new.status == COMPLETED && author(new) -> happen(new.arguments) :: else fi;
     highest = (new.token > highest -> new.token : highest);
     copy(new, store)
  :: else fi }
#define request(words) printf(words, me); ask()
inline ask() {              /* without an answer nobody knows what became of the request */
  if :: ANSWERED -> answered = true; arrives = true
     :: UNANSWERED; answered = false; printf("  and gets no answer\n");
        if :: may_land -> arrives = true :: arrives = false
           :: may_land && nfull(late) -> arrives = false; late!expected,new fi fi;
  if :: arrives -> swap(expected, new); arrives = false :: else fi }

inline know(r) { copy(r, seen); expected = r.revision; copy(nothing, new) }
inline draft() { copy(seen, new); new.over = false; writes++; new.revision = a_nonce(writes); expected = what_it_saw }
inline finish(how) { draft(); ending = how; new.status = how;
  if :: outcome(new) -> new.step = NONE; new.result = me :: else fi }

inline decide() {           /* what the answer to a claim means; what is left is claimed next, or given up */
  if
  :: !answered -> used = writes                                  /* it may be stored yet: its nonce is gone */
  :: answered && store.revision == new.revision && new.owner == me -> know(new); alive[me] = true; goto own
  :: else -> printf("  and finds "); printm(store.status); printf("\n"); know(store); writes = used;
     if :: others(seen) -> printf("  and is refused: other arguments\n"); goto told :: else fi;
     if :: outcome(seen) && !seen.over -> report(seen); goto told :: else fi;
     if :: seen.status == UNKNOWN -> printf("  and reports that it is UNKNOWN\n"); goto told :: else fi;
     if :: running(seen) && BROKEN != NO_WAITING -> know(nothing) :: else fi                      /* and comes again */
  fi }

#define is_mine ((store.owner == me || BROKEN == NO_OWNER) && \
                 (store.status == IN_PROGRESS || store.status == UNKNOWN && outcome(new)))
#define goes_on (running(new) || kind == COMMIT && new.status == COMPLETED)         /* its body hears of it, or does not */
inline settle() {           /* what the answer to a later write means */
  if
  :: !answered
  :: answered && store.status == NONE -> expected = NONE; answered = false       /* forgotten: as if there was none */
  :: answered && store.status != NONE && store.revision == new.revision -> know(new);
     if :: outcome(seen) -> report(seen); goto told :: seen.status == UNKNOWN -> goto told
        :: running(seen) :: seen.status == RELEASED || seen.status == IN_PROGRESS && seen.over -> goto ended fi
  :: else ->
     if
     :: is_mine -> know(store)                                   /* the next write goes on top of it */
     :: !is_mine && goes_on -> lost = true; copy(nothing, new); printf("  and has lost its claim\n")
     :: !is_mine && !goes_on && store.status == COMPLETED && store.arguments == arguments -> report(store); goto told
     :: else -> printf("  and has lost its claim\n"); goto ended
     fi
  fi }

#define going        (seen.status == IN_PROGRESS)
#define in_body      (may_act && going && !ending)
#define may_end(how) (may_act && (!ending || ending == how || kind == COMMIT) && \
                      (going || how == COMPLETED || how == FAILED))

proctype Delivery(byte me; byte arguments) {
  Record seen, new;         /* what it knows of the store, and what it asks for */
  short expected, writes, used;
  bool answered = true, done, began, lost;
  mtype ending;             /* the end that it asked for; the body is over then */
  atomic { may_begin -> begun = me; underway++ };
claim: do
  :: atomic { may_act && answered && (!going || may_rerun(seen)) -> draft();
       new.status = IN_PROGRESS; new.owner = me; new.token = a_token(seen); new.arguments = arguments; new.result = NONE;
       new.takeovers = (going && BROKEN != NO_COUNT -> seen.takeovers + 1 : 0);
       new.step = (outcome(seen) -> NONE : seen.step); request("%d claims\n"); decide() }
  :: atomic { may_act && answered && going && !may_rerun(seen) -> draft();
       new.status = UNKNOWN; request("%d gives up what another began\n"); decide() }
  :: atomic { may_act && !answered -> request("%d asks again\n"); decide() }
  :: atomic { may_die -> printf("%d dies\n", me); goto ended } od;
own: do
  :: atomic { in_body && !done &&
              (kind == BARE || kind == STEP && seen.step != FINISHED || began && seen.step == BEGUN) ->
       printf("%d has its effect\n", me); done = true; happen(arguments) }
  :: atomic { going && !lost && may_renew -> draft(); request("%d renews\n"); settle() }
  :: atomic { in_body && !lost && !done && kind == STEP_AT_MOST_ONCE && seen.step == NONE -> draft();
       began = true; new.step = BEGUN; request("%d begins its step\n"); settle() }
  :: atomic { in_body && !lost && done && kind != BARE && seen.step != FINISHED -> draft();
       new.step = FINISHED; request("%d finishes its step\n"); settle() }
  :: atomic { may_end(COMPLETED) && (kind == COMMIT && !lost || kind == BARE && done || seen.step == FINISHED ||
              kind != COMMIT && ending == COMPLETED) ->
       finish(COMPLETED); request("%d completes\n"); settle() }
  :: atomic { may_end(FAILED) && (!doubt || BROKEN == NO_DOUBT) -> finish(FAILED); request("%d fails for good\n"); settle() }
  :: atomic { may_end(RELEASED) && !lost && faulty && !(refuse && done) ->
       finish(RELEASED); request("%d releases\n"); settle() }
  :: atomic { may_end(UNKNOWN) && !lost && (refuse && faulty || doubt || ending == UNKNOWN) ->
       finish(UNKNOWN); request("%d gives up\n"); settle() }
  :: atomic { may_end(IN_PROGRESS) && !lost && faulty ->
       finish(IN_PROGRESS); new.over = true; request("%d is late\n"); settle() }
  :: atomic { lost && answered -> printf("%d ends, as it has nothing to give back\n", me); goto ended }
  :: atomic { may_act && !answered -> request("%d asks again\n"); settle() }
  :: atomic { may_die -> printf("%d dies\n", me); goto ended } od;
told: answered_last = (me == ACTORS);
ended: atomic { know(nothing); alive[me] = false; answered = true; done = false; began = false; lost = false; ending = NONE;
    if :: !faulty && !answered_last -> used = writes; goto claim /* its message comes again */
       :: else -> underway--; writes = 0; used = 0 fi } }

proctype Other(byte me) {   /* who takes an owner for dead, a person with a verdict, or a publisher */
  Record seen, new; short expected; bool answered;
  atomic { may_look -> begun = me; know(store) };
  atomic { copy(seen, new); new.revision = me;
    if
    :: going -> new.over = true; printf("the owner is taken for dead\n")
    :: seen.status == UNKNOWN && effects[seen.arguments] ->
       new.status = COMPLETED; new.result = me; new.step = NONE; printf("a verdict: it happened\n")
    :: seen.status == UNKNOWN && !effects[seen.arguments] && (!alive[seen.owner] || BROKEN == HASTY_VERDICT) ->
       new.status = RELEASED; new.step = (seen.step == BEGUN -> NONE : seen.step); printf("a verdict: it did not\n")
    :: absent(seen) || seen.status == RELEASED -> new.status = RELEASED; new.owner = NONE; new.over = false;
       if :: absent(seen) || unbound(seen) -> brings(new.arguments) :: else fi; new.takeovers = 0; new.result = NONE;
       new.step = (outcome(seen) -> NONE : seen.step); printf("its publication is recorded\n")
    :: else -> expected = me        /* nothing to do */
    fi; ask() };
  do :: atomic { !answered -> ask() } :: break od; atomic { know(nothing); answered = false } }
active proctype World() {
  Record new; short expected;
end: do
  :: atomic { late?expected,new -> printf("a late request lands\n"); swap(expected, new);
       copy(nothing, new); expected = NONE }
  :: atomic { time_passes && running(store) -> store.over = true; printf("the lease ends\n") }
  :: atomic { time_passes && outcome(store) && !store.over && !underway && empty(late) ->       /* longer than any attempt */
       store.over = true; printf("the retention ends\n"); effects[0] = 0; effects[1] = 0; reported[0] = 0; reported[1] = 0 }
  :: atomic { outcome(store) && store.over || BROKEN == LIVE_RETENTION && store.status == IN_PROGRESS ->
       copy(nothing, store); printf("the store deletes the record\n") }
  :: atomic { FORGETFUL && faults && store.status != NONE && !outcome(store) ->
       faults--; copy(nothing, store); printf("the store forgets the record\n") }
  od }
init { begin() }
