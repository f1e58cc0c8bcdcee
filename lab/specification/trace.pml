/* What the actors of idempotency.pml may do where traces of the production code lead them.

   Each line of a trace is one request of an actor: what it expected and wrote, the revision that it was answered, and how
   many requests were over before it. Its numbers are those of lab/proof/traces.py. The world stays free to do what nobody
   sees: requests without an answer arrive, or do not, or late. A trace is accepted if some order of that explains all of
   its lines, and is found within so many TRIES. */

#define FORGETFUL c_expr { (*A_TRACE).forgetful }
#define time_passes false                             /* whether it is over is told by whoever looked */
#define may_begin turn
#define may_look (line(expected) == store.revision)
#define may_act turn
#define may_die false
#define what_it_saw (line(expected) / 100 == me -> line(expected) : seen.revision)     /* or its own before: it loses */
#define may_renew turn
#define a_nonce(n) line(revision)
#define brings(fingerprint) fingerprint = line(arguments)
#define a_token(r) line(token)
#define turn c_expr { A_LINE.earliest <= now.position && is_open(A_TRACE) }
#define line(field) c_expr { A_LINE.field }
#define one_of(n, a, b, c, d) (n == 1 -> a : (n == 2 -> b : (n == 3 -> c : d)))
#define status_of(n) (n == 0 -> NONE : (n == 5 -> UNKNOWN : one_of(n, IN_PROGRESS, COMPLETED, FAILED, RELEASED)))
#define step_of(n) (n == 0 -> NONE : (n == 1 -> BEGUN : FINISHED))
#define fits (turn && line(expected) == expected && line(revision) == new.revision && line(owner) == new.owner && \
  line(author) == me && status_of(line(status)) == new.status && line(lapses) == new.over && \
  (expected && expected != seen.revision || step_of(line(step)) == new.step && line(token) == new.token && \
   line(takeovers) == new.takeovers && line(arguments) == new.arguments))
#define after (store.revision == expected -> new.revision : store.revision)
#define next c_code { take(A_TRACE); now.at[A_PROCESS]++; now.position++; }
#define ANSWERED (fits && line(answered) && line(answer) == after) -> \
  store.over = (store.over || line(over) && store.revision != expected); next
#define UNANSWERED (fits && !line(answered)) -> may_land = line(answer); next
#define hold(condition, promise) if :: (condition) :: else -> c_code { (*A_TRACE).broken = promise; }; false fi

c_decl {
typedef struct Line {
  int earliest, author, expected, revision, status, owner, token, takeovers, arguments, step, lapses, answered, answer, over;
} Line;
typedef struct Trace {
  int actors, kind, refuse, most, forgetful, at[ACTORS + 1], other[ACTORS + 1], arguments[ACTORS + 1];
  int lines, accepted, reached, tries;
  const char *broken;
} Trace;
}
#define A_PROCESS ((P0 *)_this)->_pid
#define A_TRACE (&traces[now.chosen])
#define A_LINE lines[now.at[A_PROCESS]]
c_code {
Trace before; Line *lines; Trace *traces = &before; int traced;

int is_open(Trace *trace) { return !(*trace).accepted && (*trace).tries++ < TRIES; }
void take(Trace *trace) {
  if (now.position + 1 > (*trace).reached) (*trace).reached = now.position + 1;
  if (now.position + 1 == (*trace).lines) (*trace).accepted = 1;
}
void tell(void) {
  int each;
  for (each = 0; each < traced; each++)
    if (!traces[each].accepted)
      printf("rejected %d after %d: %s\n", each, traces[each].reached, traces[each].tries > TRIES ? "not explained" :
             traces[each].broken ? traces[each].broken : "");
  printf("judged %d\n", traced);
}
int a_number(void) { int found; if (scanf("%d", &found) != 1) { printf("not a trace\n"); exit(2); } return found; }
void load(void) {
  int each, actor, count, all = 0, room = a_number();
  traced = a_number(); traces = calloc(traced, sizeof(Trace)); lines = calloc(room, sizeof(Line));
  for (each = 0; each < traced; each++) {
    Trace *trace = &traces[each];
    (*trace).kind = a_number(); (*trace).refuse = a_number(); (*trace).most = a_number();
    (*trace).forgetful = a_number(); (*trace).actors = a_number();
    for (actor = 1; actor <= (*trace).actors; actor++) {
      (*trace).other[actor] = a_number(); (*trace).arguments[actor] = a_number(); (*trace).at[actor] = all;
      for (count = a_number(); count > 0; count--, all++, (*trace).lines++) {
        int *field = (int *)&lines[all], left = sizeof(Line) / sizeof(int);
        while (left--) *field++ = a_number();
      }
      lines[all++].earliest = room;
    }
  }
  atexit(tell);
}
}

int chosen, position, at[ACTORS + 4];
bool may_land;              /* whether anybody has seen what got no answer; if not, it may as well have got lost */
byte number = 1;

inline begin() {
  c_code { load(); };
  do :: c_expr { now.chosen + 1 < traced } -> chosen++ :: break od;
  atomic {
    kind = one_of(c_expr { (*A_TRACE).kind }, BARE, STEP, STEP_AT_MOST_ONCE, COMMIT);
    refuse = c_expr { (*A_TRACE).refuse }; most = c_expr { (*A_TRACE).most };
    do
    :: number <= c_expr { (*A_TRACE).actors } -> at[number + 1] = c_expr { (*A_TRACE).at[now.number] };
       if
       :: c_expr { (*A_TRACE).other[now.number] } -> run Other(number)
       :: else -> run Delivery(number, c_expr { (*A_TRACE).arguments[now.number] })
       fi; number++
    :: else -> break
    od
  }
}
