from .scheduler import ConnectionBudget as ConnectionBudget, ConnectionLimit as ConnectionLimit
from .scheduler import Health as Health, backoff_s as backoff_s
from .fetcher import Fetcher as Fetcher
from .scheduler import Attempt as Attempt, Call as Call, Hedging as Hedging
from .scheduler import RequestTimes as RequestTimes, Scheduler as Scheduler
from .scheduler import StoreRequest as StoreRequest, quantile as quantile
